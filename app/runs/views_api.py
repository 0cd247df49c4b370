"""Saved views of the list of runs: everybody has their own."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, requires
from app.dependencies import Db
from app.http.parameters import Body, Name, RowId, Sort, Text
from app.runs import columns, filters
from db.runs import views

router = APIRouter(prefix="/views", tags=["runs"])


class View(Body):
    """Parts of the list's address."""

    name: Annotated[Text, Field(min_length=1, max_length=views.NAME_CHARACTERS)]
    filter: Annotated[str, Field(description="As the list takes it")] = ""
    sort: Sort = "-id"
    columns: Annotated[Text, Field(description="With commas between them; empty: the usual")] = ""
    group: Annotated[Name, Field(description="What runs are grouped by; empty: each by itself")] = (
        ""
    )


class Saved(View):
    """One that is kept."""

    id: int


@router.get("")
@requires(ACCOUNT)
def list_views(session: Db, principal: SignedIn) -> list[Saved]:
    """List your own views by name."""
    return [
        Saved.model_validate(view, from_attributes=True)
        for view in views.listed(session, principal.user)
    ]


@router.post("", status_code=201)
@requires(ACCOUNT)
def save_view(view: View, session: Db, principal: SignedIn) -> Saved:
    """Save a view, in place of your own of the same name."""
    filters.read(view.filter, me=principal.user.name)
    columns.chosen(view.columns)
    saved = views.save(
        session, principal.user, view.name.strip(), **view.model_dump(exclude={"name"})
    )
    return Saved.model_validate(saved, from_attributes=True)


@router.delete("/{view_id}", status_code=204)
@requires(ACCOUNT)
def delete_view(view_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete one of your own views."""
    views.delete(session, principal.user, view_id)
