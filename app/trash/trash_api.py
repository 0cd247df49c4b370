"""Routes of the trash: list, delete, restore and erase runs."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, TheSettings
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId
from db.access.permissions import Permission
from db.runs import trash
from db.settings import Settings
from db.tables import Run, Status

router = APIRouter(tags=["trash"])


class DeletedRun(BaseModel):
    """A run in the trash."""

    id: int
    name: str
    owner: str
    status: Status
    stored_bytes: Annotated[
        int, Field(description="Size of its checkpoints and artifacts on the server")
    ]
    deleted_at: float
    erased_after: Annotated[float, Field(description="Time of its erasure")]
    erasing: Annotated[
        bool, Field(description="The erasure has begun: it can no longer be restored")
    ]


class Trash(ListPage):
    """A page of the trash, newest run first."""

    runs: list[DeletedRun]
    stored_bytes: Annotated[int, Field(description="Size of the files of all runs in the trash")]


@router.get("/trash")
@requires(SIGNED_IN)
def list_trash(
    session: Db, settings: TheSettings, _principal: SignedIn, after: After = "", limit: Limit = 50
) -> Trash:
    """List deleted runs that are not erased yet."""
    page = trash.listed(session, after=after, limit=limit)
    return Trash(
        runs=[deleted(run, owner, settings) for run, owner in page.rows],
        stored_bytes=trash.contents(session).stored_bytes,
        total=page.total,
        next=page.next,
    )


@router.delete("/runs/{run_id}", status_code=204)
@requires(Permission.DELETE_RUN)
def delete_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Move an ended run to the trash. Idempotent."""
    trash.delete(session, run_id, principal.user)


@router.post("/runs/{run_id}/restoration", status_code=204)
@requires(Permission.DELETE_RUN)
def restore_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Restore a run from the trash. Idempotent."""
    trash.restore(session, run_id, principal.user)


@router.post("/runs/{run_id}/erasure", status_code=202)
@requires(Permission.DELETE_RUN)
def erase_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Erase a run in the trash now, with its rows and files; this cannot be undone."""
    trash.erase(session, run_id, principal.user)


def deleted(run: Run, owner: str, settings: Settings) -> DeletedRun:
    """Return the representation of a run in the trash, for the API and the page."""
    columns = ("id", "name", "status", "stored_bytes", "deleted_at", "erasing")
    fields = {name: getattr(run, name) for name in columns}
    return DeletedRun(
        **fields, owner=owner, erased_after=trash.erased_after(run, settings.trash_days)
    )
