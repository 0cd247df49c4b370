"""Where checkpoints and artifacts are kept: the data folder by default, a bucket by URL."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store, from_url
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.database import Database
from db.errors import Invalid, StorageFull
from db.settings import Settings
from db.tables import ACTIVE, Artifact, CheckpointFile, Run

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

#: Of a run's files, those that rows name.
FOLDERS = ("/checkpoints/", "/artifacts/", "/log/")
#: Rows that name a file of the store's.
Stored = CheckpointFile | Artifact
#: A file goes to a bucket in parts, so many at once: 64 MiB of memory, however large it is.
PART_BYTES, PARTS_AT_ONCE = 16 * 2**20, 4
#: S3 takes no more; of what is larger than 156 GiB the parts are.
MOST_PARTS = 10_000
#: Of a listing: what S3 answers at once.
PAGE_FILES = 1000
#: A request of which nothing is heard for so long is given up; a part has to arrive within it.
SILENCE_SECONDS = 30.0
#: How long a server or a worker that starts waits for a bucket.
CHECK_SECONDS = 5.0


def open_store(settings: Settings, *, retry_seconds: float = 180.0) -> ObjectStore:
    """Open the store that HALFSTEP_STORAGE_URL names. Raises Invalid.

    retry_seconds: how long to try again what a bucket does not answer.
    """
    if not settings.storage_url:
        return LocalStore(settings.data, mkdir=True)
    try:
        return _open_bucket(settings.storage_url, retry_seconds)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise Invalid({"HALFSTEP_STORAGE_URL": str(error)}) from error


def check_store(settings: Settings) -> None:
    """See that the bucket is there and lets us list it. Raises Invalid."""
    if not settings.storage_url:
        return
    store = open_store(settings, retry_seconds=CHECK_SECONDS)
    try:
        next(iter(obstore.list(store, prefix="runs")), None)
    except obstore.exceptions.BaseError as error:
        text = f"it cannot be listed: {why(error)}"
        raise Invalid({"HALFSTEP_STORAGE_URL": text}) from error


def why(error: Exception) -> str:
    """Return what a store said, in its own words if it had any, on one line."""
    said = re.search(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>", str(error))
    return ": ".join(said.groups()) if said else str(error).partition("\n")[0]


def is_full(error: BaseException) -> bool:
    """Return whether an error of a disk or a store means that there is no room left."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def storage_full(folder: Path, needed: int) -> StorageFull:
    """Return the error of a file that does not fit on the disk of a folder, with sizes in bytes."""
    free = shutil.disk_usage(folder).free
    text = f"The disk that stores files is full: {needed:,} bytes are needed, {free:,} are free."
    return StorageFull(f"{text} Ask the operator to free space, then send the file again.")


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Copy a file into the store, unless the store is the very folder that it lies in.

    Nobody finds it there before it is whole. If it fails, the parts that have arrived are deleted;
    of a process that is killed they stay until the bucket's own rule deletes them.
    """
    if not is_in_place(store, path, key):
        part_bytes = max(PART_BYTES, -(-path.stat().st_size // MOST_PARTS))
        with _no_bucket_as_outage():
            obstore.put(store, key, path, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)


def is_in_place(store: ObjectStore, path: Path, key: str = "") -> bool:
    """Tell whether the store has what this key names, or all that it has, at this very path."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return folder is not None and Path(folder, key) == path


def signed_address(store: ObjectStore, key: str, *, seconds: float) -> str | None:
    """Return where whoever holds the address reads the file for so long; None if no bucket does."""
    if isinstance(store, S3Store | GCSStore | AzureStore):
        return obstore.sign(store, "GET", key, timedelta(seconds=seconds))
    return None


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


def delete_files(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete files from the store: of a bucket by a request each, some of them at once."""
    if isinstance(store, LocalStore):  # of many, it would leave the rest where one is gone
        for key in keys:
            delete_file(store, key)
    elif keys:
        obstore.delete(store, list(keys))


def get_file(store: ObjectStore, key: str, path: Path, *, sha256: str) -> None:
    """Bring a file from the store to a path, unless it is there, and check that it is whole.

    Raises FileNotFoundError if the store has lost it, ValueError if it is not what was recorded.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _no_bucket_as_outage():
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
    row: Stored | None


def mismatches(session: Session, store: ObjectStore, *, deep: bool = False) -> list[Mismatch]:
    """Compare rows and files; deep: by the SHA-256 of every file, not by its size alone.

    Files of a run in training are passed over: the last may not be published yet. Memory grows by
    a number a file, besides what does not match.
    """
    # In this order: what is not in training now publishes nothing more.
    in_training = session.scalars(select(Run.id).where(Run.status.in_(ACTIVE))).all()
    passed_over = tuple(f"runs/{run_id}/" for run_id in in_training)
    found, strangers = [], []
    seen: dict[type[Stored], set[int]] = {CheckpointFile: set(), Artifact: set()}
    for files in _pages(store):
        rows = _rows(session, files)
        for row in rows:
            seen[type(row)].add(row.id)
            if problem := _problem(store, row, files[row.key], deep=deep):
                found.append(Mismatch(row.key, problem, row))
        unnamed = files.keys() - {row.key for row in rows}
        strangers += [key for key in unnamed if not key.startswith(passed_over)]
    for table in (CheckpointFile, Artifact):
        for row in _unseen(session, table, seen[table]):
            found.append(Mismatch(row.key, "the file is missing", row))
    return found + [Mismatch(key, "no row names the file", None) for key in sorted(strangers)]


def mend(database: Database, store: ObjectStore, found: list[Mismatch]) -> None:
    """Delete what does not match: rows without a sound file, and then files without a row.

    Pages that show such a row are told. No transaction waits for the store.
    """
    with database.writing() as session:
        _delete_rows(session, found)
    keys = [mismatch.key for mismatch in found]
    for first in range(0, len(keys), PAGE_FILES):
        page = keys[first : first + PAGE_FILES]
        with database.reading() as session:  # also by what came since the comparison
            named = {row.key for row in _rows(session, page)}
        delete_files(store, {*page} - named)


def _delete_rows(session: Session, found: list[Mismatch]) -> None:
    rows = [mismatch.row for mismatch in found if mismatch.row is not None]
    # By id, as everybody locks runs: two that lock in other orders would wait for each other.
    for run_id in sorted({row.run_id for row in rows}):
        run = session.get_one(Run, run_id, with_for_update=True)
        run.revision += 1
        run.files_revision = run.revision
        run.stored_bytes -= sum(row.stored_bytes for row in rows if row.run_id == run_id)
    for row in rows:
        session.execute(delete(type(row)).where(type(row).id == row.id))


def _open_bucket(url: str, retry_seconds: float) -> ObjectStore:
    # How long it takes, and not how often it is tried, says when to give up.
    retry: RetryConfig = {"retry_timeout": timedelta(seconds=retry_seconds), "max_retries": 1000}
    client: ClientConfig = {
        # By default a request ends after 30 seconds, in the midst of a file of gigabytes too.
        "timeout": timedelta(days=1),
        "read_timeout": timedelta(seconds=max(SILENCE_SECONDS, retry_seconds)),
    }
    if obstore.parse_scheme(url) != "s3":
        return from_url(url, retry_config=retry, client_options=client)
    # Of its own accord obstore reads this only where it is given no options.
    client["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    # Of many keys in one request MinIO's descendants tell what obstore cannot read.
    return from_url(url, retry_config=retry, client_options=client, disable_bulk_delete=True)


@contextmanager
def _no_bucket_as_outage() -> Iterator[None]:
    """A bucket that is gone has not lost a file: it is waited for, as one that is silent."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise
        raise obstore.exceptions.GenericError(why(error)) from error


def _pages(store: ObjectStore) -> Iterator[dict[str, int]]:
    """Yield the sizes of all files that rows may name, a page of the store's after another."""
    for page in obstore.list(store, prefix="runs", chunk_size=PAGE_FILES):
        sizes = {meta["path"]: meta["size"] for meta in page}
        yield {key: size for key, size in sizes.items() if any(each in key for each in FOLDERS)}


def _rows(session: Session, keys: Collection[str]) -> list[Stored]:
    """Return the rows that name any of these; a run's files lie below its own number."""
    numbers = {key.partition("/")[2].partition("/")[0] for key in keys}
    run_ids = [int(number) for number in numbers if number.isdecimal() and len(number) < 19]
    found: list[Stored] = []
    for table in (CheckpointFile, Artifact):
        mine = select(table).where(table.run_id.in_(run_ids), table.key.in_(keys))
        found += session.scalars(mine)
    return found


def _unseen(
    session: Session, table: type[CheckpointFile] | type[Artifact], seen: set[int]
) -> list[Stored]:
    """Return the rows whose files the store should have, without those that were seen."""
    stored = select(table.id).where(table.key != "").order_by(table.id)
    ids = session.scalars(stored.execution_options(yield_per=PAGE_FILES))
    unseen = [row_id for row_id in ids if row_id not in seen]
    rows: list[Stored] = []
    for first in range(0, len(unseen), PAGE_FILES):
        rows += session.scalars(select(table).where(table.id.in_(unseen[first:][:PAGE_FILES])))
    return rows


def _problem(store: ObjectStore, row: Stored, size_bytes: int, *, deep: bool) -> str | None:
    if size_bytes != row.size_bytes:
        return f"the file has {size_bytes} bytes, recorded were {row.size_bytes}"
    if deep and _sha256(store, row.key) != row.sha256:
        return "the file is altered: its SHA-256 is another"
    return None


def _sha256(store: ObjectStore, key: str) -> str:
    digest = hashlib.sha256()
    for chunk in obstore.get(store, key):
        digest.update(chunk)
    return digest.hexdigest()
