"""JSON routes of saved views of the list of runs; each user has their own."""

from typing import Annotated

from pydantic import Field

from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import Body, Name, RowId, Sort, Text
from app.runs import columns, filters
from db.runs import views

router = Router(prefix="/views", tags=["runs"])


class View(Body):
    """Filter, order, columns and grouping of the list."""

    name: Annotated[Text, Field(min_length=1, max_length=views.NAME_CHARACTERS)]
    filter: Annotated[str, Field(description="Same syntax as the list of runs")] = ""
    sort: Sort = "-id"
    columns: Annotated[Text, Field(description="Comma-separated; empty: default columns")] = ""
    group: Annotated[Name, Field(description="Column or setting; empty: not grouped")] = ""


class SavedView(View):
    """A saved view."""

    id: int


@router.get("", ACCOUNT)
def list_views(session: Db, principal: SignedIn) -> list[SavedView]:
    """List your own views by name."""
    return [
        SavedView.model_validate(view, from_attributes=True)
        for view in views.list_views(session, principal.user)
    ]


@router.post("", ACCOUNT, status_code=201)
def save_view(view: View, session: Db, principal: SignedIn) -> SavedView:
    """Save a view; one of yours with the same name is replaced."""
    filters.read(view.filter, me=principal.user.name)
    columns.chosen(view.columns)
    saved = views.save(
        session, principal.user, view.name.strip(), **view.model_dump(exclude={"name"})
    )
    return SavedView.model_validate(saved, from_attributes=True)


@router.delete("/{view_id}", ACCOUNT, status_code=204)
def delete_view(view_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete one of your own views."""
    views.delete(session, principal.user, view_id)
