"""Page of the trash, and the forms to delete, restore and erase runs."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from app.auth.authentication import SignedIn, local_path
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, Posted, TheSettings
from app.html.rendering import page
from app.http.list_pages import After
from app.http.parameters import RunId
from app.reports.reports import may_delete
from app.trash.disk import disk
from app.trash.trash_api import deleted
from db.access.permissions import Permission
from db.runs import reports, trash

router = APIRouter()

PAGE_SIZE = 50


@router.get("/trash")
@requires(SIGNED_IN)
def show_trash(
    request: Request, session: Db, settings: TheSettings, principal: SignedIn, after: After = ""
) -> HTMLResponse:
    """Show deleted runs with the time until which they can be restored."""
    runs_page = trash.listed(session, after=after, limit=PAGE_SIZE)
    return page(
        request,
        "trash/trash.html",
        principal=principal,
        rows=[deleted(run, owner, settings) for run, owner in runs_page.rows],
        reports=reports.deleted(session, limit=PAGE_SIZE),
        may_delete=partial(may_delete, grants=principal.grants),
        older=runs_page.next,
        trash_contents=trash.contents(session),
        disk=disk(settings),
        days=settings.trash_days,
    )


@router.post("/runs/{run_id}/deletion")
@requires(Permission.DELETE_RUN)
def delete_run(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Move a run to the trash, and redirect to the list, which offers to undo it."""
    trash.delete(session, run_id, principal.user)
    return RedirectResponse(f"/runs?deleted={run_id}", status_code=303)


@router.post("/runs/{run_id}/restoration")
@requires(Permission.DELETE_RUN)
def restore_run(
    run_id: RunId, session: Db, posted: Posted, principal: SignedIn
) -> RedirectResponse:
    """Restore a run from the trash."""
    trash.restore(session, run_id, principal.user)
    back = local_path(str(posted.get("back", f"/runs/{run_id}")))
    return RedirectResponse(back, status_code=303)


@router.post("/runs/{run_id}/erasure")
@requires(Permission.DELETE_RUN)
def erase_run(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Erase a run in the trash."""
    trash.erase(session, run_id, principal.user)
    return RedirectResponse("/trash", status_code=303)
