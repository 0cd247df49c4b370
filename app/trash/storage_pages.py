"""Page of the space that the data folder takes, by its entries."""

import os
from pathlib import Path

from fastapi.responses import HTMLResponse

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.rendering import Context
from app.trash.disk import disk
from db.runs import runs, trash

router = Router()


@router.get("/storage", SIGNED_IN)
def show_storage(context: Context) -> HTMLResponse:
    """Show the size of the data folder, and what of it belongs to runs."""
    entries = sorted(_sizes(context.settings.data).items(), key=lambda entry: -entry[1])
    return context.render(
        "trash/storage.html",
        folder=context.settings.data.absolute(),
        entries=entries,
        total=sum(size for _name, size in entries),
        disk=disk(context.settings),
        stored_bytes=runs.sum_stored_bytes(context.session),
        trash_contents=trash.contents(context.session),
    )


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's entries in bytes, each with all that is in it."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: _size(entry) for entry in entries}
    except OSError:  # it is deleted meanwhile, or not accessible
        return {}


def _size(entry: os.DirEntry[str]) -> int:
    """Return the disk space of a file, or of a folder's files; links are not followed."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return sum(_sizes(Path(entry.path)).values())
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
