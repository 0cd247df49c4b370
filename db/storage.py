"""Where checkpoint files are kept: the data folder by default, a bucket by URL."""

import hashlib
from contextlib import suppress
from pathlib import Path

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

from db.errors import Invalid
from db.settings import Settings


def open_store(settings: Settings) -> ObjectStore:
    """Open the store that HALFSTEP_STORAGE_URL names. Raises Invalid."""
    if not settings.storage_url:
        return LocalStore(settings.data, mkdir=True)
    try:
        return from_url(settings.storage_url)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise Invalid({"HALFSTEP_STORAGE_URL": str(error)}) from error


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Copy a file into the store, unless the store is the very folder that it lies in."""
    in_place = isinstance(store, LocalStore) and store.prefix and Path(store.prefix) / key == path
    if not in_place:
        obstore.put(store, key, path)


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
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            for chunk in obstore.get(store, key):
                file.write(chunk)
        temporary.rename(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{key} is not whole: its SHA-256 is {found}, recorded was {sha256}")
