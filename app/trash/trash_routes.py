"""Trash: the routes that list, delete, restore and erase runs, and its page."""

from functools import partial
from typing import Annotated

from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import Field

from app.auth.authentication import SignedIn, local_path
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, Posted, TheSettings
from app.html.rendering import Context
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import DocumentedModel, RunId
from app.reports.reports import may_delete
from app.trash.disk import disk
from db.access.permissions import Permission
from db.runs import reports, trash
from db.settings import Settings
from db.tables import Run, Status

api = Router(tags=["trash"])
pages = Router()


class DeletedRun(DocumentedModel):
    """A run in the trash."""

    id: int
    name: str
    owner: str
    status: Status
    stored_bytes: int
    """Size of its checkpoints and artifacts on the server"""
    deleted_at: float
    erased_after: Annotated[float, Field(description="Time of its erasure")]
    erasing: bool
    """The erasure has begun: it can no longer be restored"""


class Trash(ListPage):
    """A page of the trash, newest run first."""

    runs: list[DeletedRun]
    stored_bytes: Annotated[int, Field(description="Size of the files of all runs in the trash")]


@api.get("/trash", SIGNED_IN)
def list_trash(session: Db, settings: TheSettings, after: After = "", limit: Limit = 50) -> Trash:
    """List deleted runs that are not erased yet."""
    listed = trash.list_runs(session, after=after, limit=limit)
    return Trash(
        runs=[describe_deleted(run, owner, settings) for run, owner in listed.rows],
        stored_bytes=trash.contents(session).stored_bytes,
        total=listed.total,
        next=listed.next,
    )


@api.delete("/runs/{run_id}", Permission.DELETE_RUN, status_code=204)
def delete_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Move an ended run to the trash. Idempotent."""
    trash.delete(session, run_id, principal.user)


@api.post("/runs/{run_id}/restoration", Permission.DELETE_RUN, status_code=204)
def restore_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Restore a run from the trash. Idempotent."""
    trash.restore(session, run_id, principal.user)


@api.post("/runs/{run_id}/erasure", Permission.DELETE_RUN, status_code=202)
def erase_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Erase a run in the trash now, with its rows and files; this cannot be undone."""
    trash.erase(session, run_id, principal.user)


def describe_deleted(run: Run, owner: str, settings: Settings) -> DeletedRun:
    """Return the representation of a run in the trash, for the API and the page."""
    columns = ("id", "name", "status", "stored_bytes", "deleted_at", "erasing")
    fields = {name: getattr(run, name) for name in columns}
    return DeletedRun(
        **fields, owner=owner, erased_after=trash.get_erasure_time(run, settings.trash_days)
    )


PAGE_SIZE = 50


@pages.get("/trash", SIGNED_IN)
def show_trash(context: Context, after: After = "") -> HTMLResponse:
    """Show deleted runs with the time until which they can be restored."""
    runs_page = trash.list_runs(context.session, after=after, limit=PAGE_SIZE)
    return context.render(
        "trash/trash.html",
        rows=[describe_deleted(run, owner, context.settings) for run, owner in runs_page.rows],
        reports=reports.list_deleted(context.session, limit=PAGE_SIZE),
        may_delete=partial(may_delete, grants=context.principal.grants),
        older=runs_page.next,
        trash_contents=trash.contents(context.session),
        disk=disk(context.settings),
        days=context.settings.trash_days,
    )


@pages.post("/runs/{run_id}/deletion", Permission.DELETE_RUN)
def post_deletion(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Move a run to the trash, and redirect to the list, which offers to undo it."""
    trash.delete(session, run_id, principal.user)
    return RedirectResponse(f"/runs?deleted={run_id}", status_code=303)


@pages.post("/runs/{run_id}/restoration", Permission.DELETE_RUN)
def post_restoration(
    run_id: RunId, session: Db, posted: Posted, principal: SignedIn
) -> RedirectResponse:
    """Restore a run from the trash."""
    trash.restore(session, run_id, principal.user)
    back = local_path(str(posted.get("back", f"/runs/{run_id}")))
    return RedirectResponse(back, status_code=303)


@pages.post("/runs/{run_id}/erasure", Permission.DELETE_RUN)
def post_erasure(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Erase a run in the trash."""
    trash.erase(session, run_id, principal.user)
    return RedirectResponse("/trash", status_code=303)
