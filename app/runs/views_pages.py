"""Form actions of saved views: save and delete."""

from typing import Annotated

from fastapi import Form
from fastapi.responses import RedirectResponse

from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import FormText, Name, RowId, Sort, Text
from app.runs import columns, filters
from app.runs.columns import list_address
from db.runs import views

router = Router(prefix="/views")


@router.post("", ACCOUNT)
def save_view(
    session: Db,
    principal: SignedIn,
    name: FormText = "",
    typed: Annotated[str, Form(alias="filter")] = "",
    sort: Annotated[Sort, Form()] = "-id",
    chosen: Annotated[Text, Form(alias="columns")] = "",
    group: Annotated[Name, Form()] = "",
) -> RedirectResponse:
    """Save the current filter, order, columns and grouping under a name."""
    filters.read(typed, me=principal.user.name)
    columns.chosen(chosen)
    query = {"filter": typed, "sort": sort, "columns": chosen, "group": group}
    views.save(session, principal.user, name.strip(), **query)
    return RedirectResponse(list_address(**query), status_code=303)


@router.post("/{view_id}/deletion", ACCOUNT)
def delete_view(view_id: RowId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Delete a view, and show its list so that it can be saved again."""
    view = views.delete(session, principal.user, view_id)
    query = {name: getattr(view, name) for name in ("filter", "sort", "columns", "group")}
    return RedirectResponse(list_address(**query), status_code=303)
