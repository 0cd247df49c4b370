"""Lists, a page at a time: how much of one to ask for, and where it goes on."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel

After = Annotated[str, Query(description="`next` of the page before; empty for the first")]
Limit = Annotated[int, Query(ge=1, le=5000)]


class ListPage(BaseModel):
    """total: of all pages; next: what `after` is for the next one, null on the last."""

    total: int
    next: str | None
