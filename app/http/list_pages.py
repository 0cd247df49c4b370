"""Pagination parameters and the base of list responses."""

from typing import Annotated

from fastapi import Query
from pydantic import Field

from app.http.parameters import DocumentedModel

After = Annotated[str, Query(description="`next` of the previous page; empty for the first")]
Limit = Annotated[int, Query(ge=1, le=5000)]


class ListPage(DocumentedModel):
    """Base of list responses."""

    total: Annotated[int, Field(description="Items on all pages")]
    next: Annotated[str | None, Field(description="`after` of the next page; null on the last")]
