"""Weights that people upload to start runs from: where they lie, and which of them may go.

One is the store's file uploads/<SHA-256>/<name>; what follows uploads/ is `weights.upload` of a
configuration. A row of `uploads` records who sent it: to know its hash grants nothing.
"""

import time
from collections.abc import Collection
from contextlib import suppress

import obstore
from obstore.store import ObjectStore
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from db.access.permissions import Grants, Permission
from db.database import now
from db.files.storage import PAGE_FILES, delete_files
from db.runs.trash import DAY_SECONDS
from db.settings import Settings
from db.tables import RECIPE, Run, RunConfigValue, Upload, User

FOLDER = "uploads"
SETTING = "weights.upload"
#: Of what nobody has started a run from, or of what came in half as a server was killed.
KEPT_SECONDS = DAY_SECONDS


NOT_YOURS = (
    "there is no upload {} that you may download; allowed: one of yours, or one that a run started "
    "from whose files you may download: upload it again"
)


def key(upload: str) -> str:
    """Return where the store has it. upload: as configurations name it."""
    return f"{FOLDER}/{upload}"


def record(session: Session, user: User, upload: str, size_bytes: int, project: str | None) -> None:
    """Record that a user has uploaded a file. project: the only one that their token opens."""
    mine = (Upload.upload == upload, Upload.user_id == user.id)
    is_same = Upload.project.is_(None) if project is None else Upload.project == project
    session.execute(delete(Upload).where(*mine, is_same))
    session.add(Upload(upload=upload, user_id=user.id, project=project, size_bytes=size_bytes))


def may_download(session: Session, grants: Grants, upload: str) -> bool:
    """Return whether a user sent this upload, or may download files of a run that started from it.

    By a token of one project: whether it was sent with such a token, or for a run of that project.
    Operators may download every one.
    """
    if grants.is_admin and grants.only is None:
        return True
    own = select(Upload.id).where(Upload.upload == upload, Upload.user_id == grants.user_id)
    if grants.only is not None:
        own = own.where(Upload.project == grants.only)
    if session.scalar(own.limit(1)) is not None:
        return True
    # Of recipes only: the configuration of a watched run or a command is what its sender wrote.
    started = select(Run.project).join(RunConfigValue, RunConfigValue.run_id == Run.id).distinct()
    started = started.where(*_names(upload), Run.source == RECIPE, ~Run.erasing)
    return any(
        grants.may(Permission.DOWNLOAD_FILES, project) for project in session.scalars(started)
    )


def _names(upload: str) -> tuple[ColumnElement[bool], ...]:
    is_setting = (RunConfigValue.name == SETTING.rpartition(".")[2], RunConfigValue.path == SETTING)
    return (*is_setting, RunConfigValue.text == upload)


def forget_unused(session: Session, kept: Collection[str]) -> None:
    """Delete the records of uploads that are a day old and none of these."""
    old = Upload.uploaded_at < now() - KEPT_SECONDS
    found = session.scalars(select(Upload.upload).where(old).distinct()).all()
    for upload in set(found).difference(kept):
        session.execute(delete(Upload).where(Upload.upload == upload, old))


def named(session: Session) -> set[str]:
    """Return what runs start from, those in the trash among them."""
    query = select(RunConfigValue.text).distinct().join(Run, Run.id == RunConfigValue.run_id)
    query = query.where(
        RunConfigValue.name == SETTING.rpartition(".")[2], RunConfigValue.path == SETTING
    )
    # Not set, it is written as JSON's null, or empty; an upload is <SHA-256>/<name>.
    query = query.where(~Run.erasing, RunConfigValue.text.contains("/"))
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
