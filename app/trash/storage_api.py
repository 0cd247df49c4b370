"""What the runs' files take, and what room there is."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, TheSettings
from app.trash.disk import disk
from db.runs import runs, trash

router = APIRouter(tags=["workers"])


class DiskSpace(BaseModel):
    """Of the file system that the data folder is on, whoever fills it."""

    total_bytes: int
    free_bytes: int


class Storage(BaseModel):
    """By run it is the list of runs, by stored_bytes."""

    disk: Annotated[DiskSpace | None, Field(description="Null where a bucket has the files")]
    stored_bytes: Annotated[int, Field(description="Checkpoints and artifacts of all runs")]
    trash_bytes: Annotated[
        int, Field(description="Of those in the trash, which are not among these")
    ]
    trash_runs: int


@router.get("/storage")
@requires(SIGNED_IN)
def get_storage(session: Db, settings: TheSettings, _principal: SignedIn) -> Storage:
    """Look at the disk."""
    space, binned = disk(settings), trash.contents(session)
    return Storage(
        disk=DiskSpace(**vars(space)) if space else None,
        stored_bytes=runs.stored_bytes(session),
        trash_bytes=binned.stored_bytes,
        trash_runs=binned.runs,
    )
