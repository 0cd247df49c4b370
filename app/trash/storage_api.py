"""Route of storage usage and free disk space."""

from typing import Annotated

from pydantic import BaseModel, Field

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, TheSettings
from app.trash.disk import disk
from db.runs import runs, trash

router = Router(tags=["workers"])


class DiskSpace(BaseModel):
    """Size and free space of the data folder's file system."""

    total_bytes: int
    free_bytes: int


class Storage(BaseModel):
    """Storage used by runs; `stored_bytes` in the list of runs has the amount of each run."""

    disk: Annotated[DiskSpace | None, Field(description="Null if files are in a bucket")]
    stored_bytes: Annotated[int, Field(description="Checkpoints and artifacts of all runs")]
    trash_bytes: Annotated[
        int, Field(description="Files of runs in the trash, not included in stored_bytes")
    ]
    trash_runs: int


@router.get("/storage", SIGNED_IN)
def get_storage(session: Db, settings: TheSettings) -> Storage:
    """Return the storage used by runs, and the free disk space."""
    space, in_trash = disk(settings), trash.contents(session)
    return Storage(
        disk=DiskSpace(**vars(space)) if space else None,
        stored_bytes=runs.sum_stored_bytes(session),
        trash_bytes=in_trash.stored_bytes,
        trash_runs=in_trash.runs,
    )
