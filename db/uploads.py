"""Weights that people upload to start runs from: where they lie, and which of them may go.

One is the store's file uploads/<SHA-256>/<name>; what follows uploads/ is `weights.upload` of a
configuration. No row tells of it: what a store has whole, it has under its hash.
"""

import time
from collections.abc import Collection
from contextlib import suppress

import obstore
from obstore.store import ObjectStore
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.run_bin import DAY_SECONDS
from db.settings import Settings
from db.storage import PAGE_FILES, delete_files
from db.tables import Run, RunSetting

FOLDER = "uploads"
SETTING = "weights.upload"
#: Of what nobody has started a run from, or of what came in half as a server was killed.
KEPT_SECONDS = DAY_SECONDS


def key(upload: str) -> str:
    """Return where the store has it. upload: as configurations name it."""
    return f"{FOLDER}/{upload}"


def named(session: Session) -> set[str]:
    """Return what runs start from, those in the bin among them."""
    query = select(RunSetting.text).distinct().join(Run, Run.id == RunSetting.run_id)
    query = query.where(RunSetting.name == SETTING.rpartition(".")[2], RunSetting.path == SETTING)
    # Not set, it is written as JSON's null, or empty; an upload is <SHA-256>/<name>.
    query = query.where(~Run.erasing, RunSetting.text.contains("/"))
    return set(session.scalars(query))


def delete_unused(store: ObjectStore, kept: Collection[str]) -> None:
    """Delete what a bucket has had for a day and that is none of these."""
    latest = time.time() - KEPT_SECONDS
    for page in obstore.list(store, prefix=FOLDER, chunk_size=PAGE_FILES):
        old = [each["path"] for each in page if each["last_modified"].timestamp() < latest]
        delete_files(store, [key for key in old if key.removeprefix(f"{FOLDER}/") not in kept])


def delete_unused_here(settings: Settings, kept: Collection[str]) -> None:
    """Delete it of the data folder, where a worker has what it fetched from a bucket."""
    folder, latest = settings.data / FOLDER, time.time() - KEPT_SECONDS
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        upload = path.relative_to(folder).as_posix()
        with suppress(OSError):  # somebody else was first, or whose it is lets nobody else
            if upload in kept or path.stat().st_mtime >= latest:
                continue
            path.unlink()
            path.parent.rmdir()  # not if another one of the same content lies beside it
