"""The trash: what was deleted, to be restored or erased."""

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

router = APIRouter(tags=["bin"])


class DeletedRun(BaseModel):
    """A run in the trash."""

    id: int
    name: str
    owner: str
    status: Status
    stored_bytes: Annotated[int, Field(description="Of its checkpoints and artifacts here")]
    deleted_at: float
    erased_after: Annotated[float, Field(description="When it goes for good")]
    erasing: Annotated[bool, Field(description="Whether it is going: nothing brings it back")]


class Trash(ListPage):
    """A page of the trash, newest run first."""

    runs: list[DeletedRun]
    stored_bytes: Annotated[int, Field(description="Of all that is in the trash")]


@router.get("/trash")
@requires(SIGNED_IN)
def list_trash(
    session: Db, settings: TheSettings, _principal: SignedIn, after: After = "", limit: Limit = 50
) -> Trash:
    """List deleted runs that are not erased yet."""
    found = trash.listed(session, after=after, limit=limit)
    return Trash(
        runs=[deleted(run, owner, settings) for run, owner in found.rows],
        stored_bytes=trash.contents(session).stored_bytes,
        total=found.total,
        next=found.next,
    )


@router.delete("/runs/{run_id}", status_code=204)
@requires(Permission.DELETE_RUN)
def delete_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Put a run that has ended into the trash. Asked again, it changes nothing."""
    trash.delete(session, run_id, principal.user)


@router.post("/runs/{run_id}/restoration", status_code=204)
@requires(Permission.DELETE_RUN)
def restore_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Take a run out of the trash. Asked again, it changes nothing."""
    trash.restore(session, run_id, principal.user)


@router.post("/runs/{run_id}/erasure", status_code=202)
@requires(Permission.DELETE_RUN)
def erase_run(run_id: RunId, session: Db, principal: SignedIn) -> None:
    """Let a run of the trash be erased now, rows and files; nothing brings it back."""
    trash.erase(session, run_id, principal.user)


def deleted(run: Run, owner: str, settings: Settings) -> DeletedRun:
    """Say of a run in the trash what a page and a program are told."""
    columns = ("id", "name", "status", "stored_bytes", "deleted_at", "erasing")
    said = {name: getattr(run, name) for name in columns}
    return DeletedRun(
        **said, owner=owner, erased_after=trash.erased_after(run, settings.trash_days)
    )
