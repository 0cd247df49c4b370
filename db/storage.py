"""Where checkpoints and artifacts are kept: the data folder by default, a bucket by URL."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import LocalStore, ObjectStore, from_url
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.errors import Invalid
from db.settings import Settings
from db.tables import ACTIVE, Artifact, Checkpoint, Run

#: Of a run's files, those that rows name.
FOLDERS = ("/checkpoints/", "/artifacts/")


def open_store(settings: Settings, *, retry_seconds: float = 180.0) -> ObjectStore:
    """Open the store that HALFSTEP_STORAGE_URL names. Raises Invalid.

    retry_seconds: how long to try again what a bucket does not answer.
    """
    if not settings.storage_url:
        return LocalStore(settings.data, mkdir=True)
    try:
        retries = timedelta(seconds=retry_seconds)
        return from_url(settings.storage_url, retry_config={"retry_timeout": retries})
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise Invalid({"HALFSTEP_STORAGE_URL": str(error)}) from error


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Copy a file into the store, unless the store is the very folder that it lies in."""
    in_place = isinstance(store, LocalStore) and store.prefix and Path(store.prefix) / key == path
    if not in_place:
        obstore.put(store, key, path)


def is_plain(folder: Path, key: str) -> bool:
    """Tell whether a key can only be a file of this folder's: no way out of it and no link.

    The first part may be a link: an operator may keep all runs elsewhere.
    """
    top, *parts = key.split("/")
    if any(part in ("", ".", "..") for part in (top, *parts)):
        return False
    place = os.path.realpath(folder / top)
    return os.path.realpath(Path(place, *parts)) == os.path.join(place, *parts)  # noqa: PTH118


def is_own(store: ObjectStore, key: str) -> bool:
    """Tell whether a key is the store's to give out, whatever a recipe made of its folder."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return is_plain(Path(folder or os.devnull), key)


def delete_file(store: ObjectStore, key: str) -> None:
    """Delete a file from the store; one that is gone already is as good."""
    with suppress(FileNotFoundError):
        obstore.delete(store, key)


def get_file(store: ObjectStore, key: str, path: Path, *, sha256: str) -> None:
    """Bring a file from the store to a path, unless it is there, and check that it is whole.

    Raises FileNotFoundError if the store has lost it, ValueError if it is not what was recorded.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = obstore.get(store, key)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            for chunk in content:
                file.write(chunk)
        temporary.rename(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{key} is not whole: its SHA-256 is {found}, recorded was {sha256}")


@dataclass(frozen=True)
class Mismatch:
    """A row whose file is missing or damaged, or a file that no row names."""

    key: str
    problem: str
    row: Checkpoint | Artifact | None


def mismatches(session: Session, store: ObjectStore, *, deep: bool = False) -> list[Mismatch]:
    """Compare rows and files; deep: by the SHA-256 of every file, not by its size alone.

    Files of a run in training are passed over: the last may not be published yet.
    """
    # In this order: what is not in training now publishes nothing more.
    in_training = session.scalars(select(Run.id).where(Run.status.in_(ACTIVE))).all()
    passed_over = tuple(f"runs/{run_id}/" for run_id in in_training)
    rows = {row.key: row for row in _rows(session) if row.is_stored}
    files = {
        meta["path"]: meta["size"]
        for page in obstore.list(store, prefix="runs")
        for meta in page
        if any(folder in meta["path"] for folder in FOLDERS)
    }
    found = []
    for key, row in rows.items():
        if key not in files:
            found.append(Mismatch(key, "the file is missing", row))
        elif files[key] != row.size_bytes:
            text = f"the file has {files[key]} bytes, recorded were {row.size_bytes}"
            found.append(Mismatch(key, text, row))
        elif deep and _sha256(store, key) != row.sha256:
            found.append(Mismatch(key, "the file is altered: its SHA-256 is another", row))
    strangers = sorted(key for key in files.keys() - rows.keys() if not key.startswith(passed_over))
    return found + [Mismatch(key, "no row names the file", None) for key in strangers]


def mend(session: Session, store: ObjectStore, found: list[Mismatch]) -> None:
    """Delete what does not match: rows without a sound file, and files without a row.

    Pages that show such a row are told.
    """
    rows = [mismatch.row for mismatch in found if mismatch.row is not None]
    # By id, as everybody locks runs: two that lock in other orders would wait for each other.
    for run_id in sorted({row.run_id for row in rows}):
        run = session.get_one(Run, run_id, with_for_update=True)
        run.revision += 1
        run.files_revision = run.revision
        run.stored_bytes -= sum(row.stored_bytes for row in rows if row.run_id == run_id)
    for row in rows:
        session.execute(delete(type(row)).where(type(row).id == row.id))
    named = {row.key for row in _rows(session)}  # also by what came since the comparison
    for mismatch in found:
        if mismatch.key not in named:
            delete_file(store, mismatch.key)


def _rows(session: Session) -> list[Checkpoint | Artifact]:
    return [*session.scalars(select(Checkpoint)), *session.scalars(select(Artifact))]


def _sha256(store: ObjectStore, key: str) -> str:
    digest = hashlib.sha256()
    for chunk in obstore.get(store, key):
        digest.update(chunk)
    return digest.hexdigest()
