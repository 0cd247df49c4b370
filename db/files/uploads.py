"""Uploaded initial weights: location, access and deletion of unused ones.

An upload is the stored file uploads/<SHA-256>/<name>; a configuration names it in `weights.upload`
as <SHA-256>/<name>. A row of `uploads` records its sender: knowing the hash grants no access.
"""

import time
from collections.abc import Collection
from contextlib import suppress

import obstore
from obstore.store import ObjectStore
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from db.access.permissions import Grants, Permission
from db.clock import now
from db.files.object_store import PAGE_FILES, delete_files
from db.runs.trash import DAY_SECONDS
from db.settings import Settings
from db.tables import RECIPE, Run, RunConfigValue, Upload, User

FOLDER = "uploads"
SETTING = "weights.upload"
#: Lifetime of uploads that no run uses, and of partial uploads of a killed server.
UNUSED_SECONDS = DAY_SECONDS


NOT_YOURS = (
    "there is no upload {} that you may download; allowed: your own uploads, and those used by a "
    "run whose files you may download. Upload it again"
)


def key(upload: str) -> str:
    """Return the storage key of an upload. upload: as configurations name it."""
    return f"{FOLDER}/{upload}"


def record(session: Session, user: User, upload: str, size_bytes: int, project: str | None) -> None:
    """Record that a user has uploaded a file. project: the only one that their token allows."""
    mine = (Upload.upload == upload, Upload.user_id == user.id)
    is_same = Upload.project.is_(None) if project is None else Upload.project == project
    session.execute(delete(Upload).where(*mine, is_same))
    session.add(Upload(upload=upload, user_id=user.id, project=project, size_bytes=size_bytes))


def may_download(session: Session, grants: Grants, upload: str) -> bool:
    """Return whether a user sent this upload, or may download files of a run that started from it.

    With a token of one project: only uploads sent with such a token, or used by a run of that
    project. Admins may download all.
    """
    if grants.is_admin and grants.only is None:
        return True
    own = select(Upload.id).where(Upload.upload == upload, Upload.user_id == grants.user_id)
    if grants.only is not None:
        own = own.where(Upload.project == grants.only)
    if session.scalar(own.limit(1)) is not None:
        return True
    # Only recipe runs: the configuration of a watched run or a command is not validated.
    started = select(Run.project).join(RunConfigValue, RunConfigValue.run_id == Run.id).distinct()
    started = started.where(*_names(upload), Run.source == RECIPE, ~Run.erasing)
    return any(
        grants.may(Permission.DOWNLOAD_FILES, project) for project in session.scalars(started)
    )


def _names(upload: str) -> tuple[ColumnElement[bool], ...]:
    is_setting = (RunConfigValue.name == SETTING.rpartition(".")[2], RunConfigValue.path == SETTING)
    return (*is_setting, RunConfigValue.text == upload)


def forget_unused(session: Session, used: Collection[str]) -> None:
    """Delete the records of uploads that are a day old and not in use."""
    old = Upload.uploaded_at < now() - UNUSED_SECONDS
    old_uploads = session.scalars(select(Upload.upload).where(old).distinct()).all()
    for upload in set(old_uploads).difference(used):
        session.execute(delete(Upload).where(Upload.upload == upload, old))


def named(session: Session) -> set[str]:
    """Return the uploads that runs start from, including runs in the trash."""
    query = select(RunConfigValue.text).distinct().join(Run, Run.id == RunConfigValue.run_id)
    query = query.where(
        RunConfigValue.name == SETTING.rpartition(".")[2], RunConfigValue.path == SETTING
    )
    # An unset value is stored as JSON null or empty; an upload is <SHA-256>/<name>.
    query = query.where(~Run.erasing, RunConfigValue.text.contains("/"))
    return set(session.scalars(query))


def delete_unused(store: ObjectStore, used: Collection[str]) -> None:
    """Delete uploads from a bucket that are a day old and not in use."""
    latest = time.time() - UNUSED_SECONDS
    for page in obstore.list(store, prefix=FOLDER, chunk_size=PAGE_FILES):
        old = [meta["path"] for meta in page if meta["last_modified"].timestamp() < latest]
        delete_files(store, [key for key in old if key.removeprefix(f"{FOLDER}/") not in used])


def delete_unused_here(settings: Settings, used: Collection[str]) -> None:
    """Delete unused uploads from the data folder, including a worker's copies from a bucket."""
    folder, latest = settings.data / FOLDER, time.time() - UNUSED_SECONDS
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        upload = path.relative_to(folder).as_posix()
        with suppress(OSError):  # already deleted, or owned by another user
            if upload in used or path.stat().st_mtime >= latest:
                continue
            path.unlink()
            path.parent.rmdir()  # fails if another name of the same content exists
