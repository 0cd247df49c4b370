"""Storage of checkpoints and artifacts: the data folder by default, or a bucket."""

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store, from_url
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from db.database import Database, now
from db.errors import Conflict, Invalid, StorageFull
from db.files.step_files import STEPS
from db.settings import Settings
from db.tables import (
    ACTIVE,
    Artifact,
    ArtifactCollection,
    ArtifactEntry,
    ArtifactVersion,
    Backup,
    Blob,
    CheckpointFile,
    FrozenSteps,
    ReportImage,
    Run,
    Step,
)
from db.telemetry import pyramid

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

#: Folders of a run's files that rows name.
FOLDERS = ("/checkpoints/", "/artifacts/", "/log/")
#: Folder of the content of named artifacts, and below it of their incomplete uploads.
BLOBS, INCOMING = "blobs", "incoming"
#: Rows that name a stored file.
Stored = CheckpointFile | Artifact | FrozenSteps | Blob
#: Rows that a check compares with the files.
Checked = Stored | ReportImage
#: Folder of the images of reports.
REPORTS = "reports"
#: Age from which content without a row is an orphan: before, its row may not be committed.
ORPHAN_SECONDS = 3600.0
#: Whether a backup runs, which reports it every minute, or was killed just now.
IS_RUNNING = Backup.ended_at.is_(None) & (Backup.seen_at > now() - ORPHAN_SECONDS)
#: Size of an upload's parts, and concurrent ones: 64 MiB of memory for a file of any size.
PART_BYTES, PARTS_AT_ONCE = 16 * 2**20, 4
#: Limit of S3; the parts of a file above 156 GiB are larger.
MOST_PARTS = 10_000
#: Page size of a listing, S3's maximum.
PAGE_FILES = 1000
#: Timeout of a request without a response; one part must arrive within it.
SILENCE_SECONDS = 30.0
#: How long a server or a worker that starts waits for a bucket.
CHECK_SECONDS = 5.0


def open_store(settings: Settings, *, retry_seconds: float = 180.0) -> ObjectStore:
    """Open the store that HALFSTEP_STORAGE_URL names. Raises Invalid.

    retry_seconds: how long to retry requests that a bucket does not answer.
    """
    if not settings.storage_url:
        return LocalStore(settings.data, mkdir=True)
    try:
        return _open_bucket(settings.storage_url, retry_seconds)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise Invalid({"HALFSTEP_STORAGE_URL": str(error)}) from error


def check_store(settings: Settings) -> None:
    """Check that the bucket exists and can be listed. Raises Invalid."""
    if not settings.storage_url:
        return
    store = open_store(settings, retry_seconds=CHECK_SECONDS)
    try:
        next(iter(obstore.list(store, prefix="runs")), None)
    except obstore.exceptions.BaseError as error:
        text = f"the bucket cannot be listed: {why(error)}"
        raise Invalid({"HALFSTEP_STORAGE_URL": text}) from error


def why(error: Exception) -> str:
    """Return the error of a store on one line: its code and message if the response has them."""
    match = re.search(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>", str(error))
    return ": ".join(match.groups()) if match else str(error).partition("\n")[0]


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
    """Copy a file into the store, unless it is already there because the store is a folder.

    The file becomes visible once it is complete. After an error its parts are deleted; parts of a
    killed process stay until the bucket's own rule deletes them.
    """
    if not is_in_place(store, path, key):
        part_bytes = max(PART_BYTES, -(-path.stat().st_size // MOST_PARTS))
        with _no_bucket_as_outage():
            obstore.put(store, key, path, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)


def is_in_place(store: ObjectStore, path: Path, key: str = "") -> bool:
    """Return whether this path is the store's location of a key, or of the whole store."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return folder is not None and Path(folder, key) == path


def signed_address(store: ObjectStore, key: str, *, seconds: float) -> str | None:
    """Return a presigned URL of a file, valid for so long; None if the store is no bucket."""
    if isinstance(store, S3Store | GCSStore | AzureStore):
        return obstore.sign(store, "GET", key, timedelta(seconds=seconds))
    return None


def is_plain(folder: Path, key: str) -> bool:
    """Return whether a key stays within this folder: no parent references and no symlinks.

    The first part may be a symlink, for installations that store all runs elsewhere.
    """
    top, *parts = key.split("/")
    if any(part in ("", ".", "..") for part in (top, *parts)):
        return False
    root = os.path.realpath(folder / top)
    return os.path.realpath(Path(root, *parts)) == os.path.join(root, *parts)  # noqa: PTH118


def is_own(store: ObjectStore, key: str) -> bool:
    """Return whether a key is safe to serve, even if a recipe has put symlinks into its folder."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return is_plain(Path(folder or os.devnull), key)


def delete_file(store: ObjectStore, key: str) -> None:
    """Delete a file from the store, if it exists."""
    with suppress(FileNotFoundError):
        obstore.delete(store, key)


def delete_files(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete files from the store; in a bucket with concurrent requests, one per file."""
    if isinstance(store, LocalStore):  # its bulk delete stops at the first missing file
        for key in keys:
            delete_file(store, key)
    elif keys:
        obstore.delete(store, list(keys))


def get_file(store: ObjectStore, key: str, path: Path, *, sha256: str) -> None:
    """Fetch a file from the store to a path, unless it exists, and verify its SHA-256.

    Raises FileNotFoundError if the store does not have it, ValueError if the SHA-256 differs.
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
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ValueError(f"{key} is damaged: its SHA-256 is {actual}, recorded was {sha256}")


@dataclass(frozen=True)
class Mismatch:
    """A row with a missing or damaged file, or a file that no row names."""

    key: str
    problem: str
    row: Checked | None


def mismatches(session: Session, store: ObjectStore, *, deep: bool = False) -> list[Mismatch]:
    """Compare rows and files; deep: by the SHA-256 of every file, not only by its size.

    Files of runs in training are skipped: the last may not be published yet. Memory use is one
    number per file, plus the mismatches.
    """
    # Read first: a run that is not in training now publishes no more files.
    in_training = session.scalars(select(Run.id).where(Run.status.in_(ACTIVE))).all()
    skipped = tuple(f"runs/{run_id}/" for run_id in in_training)
    result: list[Mismatch] = []
    orphans: list[str] = []
    refrozen: set[str] = set()  # folders with a new file of steps
    seen: dict[type[Checked], set[int]] = {
        table: set() for table in (CheckpointFile, Artifact, FrozenSteps, Blob, ReportImage)
    }
    for files in _pages(store):
        rows = _rows(session, files)
        for row in rows:
            seen[type(row)].add(row.id)
            if problem := _problem(store, row, files[row.key]["size"], deep=deep):
                result.append(Mismatch(row.key, problem, row))
        unnamed = files.keys() - {row.key for row in rows}
        orphans += [
            key for key in unnamed if not key.startswith(skipped) and not _is_new(files[key])
        ]
        refrozen |= {
            _folder(key)
            for key, file in files.items()
            if key.startswith(f"{STEPS}/") and is_recent(file)
        }
    for table in seen:
        for row in _unseen(session, table, seen[table]):
            result.append(Mismatch(row.key, "the file is missing", row))
    # `db.telemetry.freeze` keeps the file before a new one for as long.
    orphans = sorted(key for key in orphans if _folder(key) not in refrozen)
    is_needed = _steps_needed(session)
    orphans = [key for key in orphans if not (key.startswith(f"{STEPS}/") and is_needed(key))]
    return result + [Mismatch(key, "no row names the file", None) for key in orphans]


def mend(
    database: Database, store: ObjectStore, mismatched: list[Mismatch], *, lost: bool = False
) -> None:
    """Delete mismatches: rows without an intact file, then files without a row.

    Pages that show such a row are updated. No transaction waits for the store.

    Raises Conflict if files of steps are recorded and the store has none of them, unless `lost`:
    they have the only copy of their steps, and it may be the wrong store.
    """
    recorded = sum(isinstance(mismatch.row, FrozenSteps) for mismatch in mismatched)
    if recorded and not lost and not next(iter(obstore.list(store, prefix=STEPS)), None):
        raise Conflict(
            f"The storage has no file of frozen steps, but {recorded:,} are recorded: check that "
            "its disk is mounted, and that HALFSTEP_DATA or HALFSTEP_STORAGE_URL names it. Nothing "
            "was deleted. If the files are lost, add --lost."
        )
    with database.writing() as session:
        _delete_rows(session, mismatched)
    keys = [mismatch.key for mismatch in mismatched]
    for first in range(0, len(keys), PAGE_FILES):
        page = keys[first : first + PAGE_FILES]
        with database.reading() as session:  # rows may have been added since the comparison
            named = {row.key for row in _rows(session, page)}
        delete_files(store, {*page} - named)


def _delete_rows(session: Session, mismatched: list[Mismatch]) -> None:
    every = [mismatch.row for mismatch in mismatched if mismatch.row is not None]
    _delete_blobs(session, [row for row in every if isinstance(row, Blob)])
    images = [row.id for row in every if isinstance(row, ReportImage)]
    session.execute(delete(ReportImage).where(ReportImage.id.in_(images)))
    rows = [row for row in every if not isinstance(row, Blob | ReportImage)]
    # In order of ids, like all locks of runs, to avoid deadlocks.
    for run_id in sorted({row.run_id for row in rows}):
        run = session.get_one(Run, run_id, with_for_update=True)
        run.revision += 1
        run.files_revision = run.revision
        for row in rows:
            is_deleted = row.run_id == run_id and _delete_row(session, row)
            if is_deleted and not isinstance(row, FrozenSteps):  # whose bytes are not counted
                run.stored_bytes -= row.stored_bytes


def _delete_row(session: Session, row: CheckpointFile | Artifact | FrozenSteps) -> bool:
    """Delete a row and return whether it was there, with the file that was compared."""
    table = type(row)
    its = (table.id == row.id, table.key == row.key, table.size_bytes == row.size_bytes)
    return session.connection().execute(delete(table).where(*its)).rowcount > 0


def _delete_blobs(session: Session, rows: Collection[Blob]) -> None:
    """Delete the rows of lost content: its versions are incomplete until it is saved again.

    Locks the artifacts, then the content, both in order of ids, like all who store content: a
    version could otherwise be completed meanwhile, or get an entry with the deleted content.
    """
    ids = [row.id for row in rows]
    lost = ArtifactEntry.blob_id.in_(ids)
    incomplete = ArtifactVersion.id.in_(select(ArtifactEntry.version_id).where(lost))
    its = select(ArtifactVersion.collection_id).where(incomplete)
    for table, condition in (
        (ArtifactCollection, ArtifactCollection.id.in_(its)),
        (Blob, Blob.id.in_(ids)),
    ):
        session.execute(select(table.id).where(condition).order_by(table.id).with_for_update())
    session.execute(update(ArtifactVersion).where(incomplete).values(completed_at=None))
    session.execute(update(ArtifactEntry).where(lost).values(blob_id=None))
    session.execute(delete(Blob).where(Blob.id.in_(ids)))


def _open_bucket(url: str, retry_seconds: float) -> ObjectStore:
    # The time limit decides when to stop, not the number of retries.
    retry: RetryConfig = {"retry_timeout": timedelta(seconds=retry_seconds), "max_retries": 1000}
    client: ClientConfig = {
        # The default of 30 seconds would also end a large transfer that makes progress.
        "timeout": timedelta(days=1),
        "read_timeout": timedelta(seconds=max(SILENCE_SECONDS, retry_seconds)),
    }
    if obstore.parse_scheme(url) != "s3":
        return from_url(url, retry_config=retry, client_options=client)
    # obstore reads this variable only if no client options are given.
    client["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    # obstore cannot parse the bulk-delete response of MinIO and its forks.
    return from_url(url, retry_config=retry, client_options=client, disable_bulk_delete=True)


@contextmanager
def _no_bucket_as_outage() -> Iterator[None]:
    """Turn a missing bucket into an outage, which is retried, instead of a missing file."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise
        raise obstore.exceptions.GenericError(why(error)) from error


def _pages(store: ObjectStore) -> "Iterator[dict[str, ObjectMeta]]":
    """Yield all files that rows may name, by page of the store's listing."""
    for prefix in ("runs", BLOBS, REPORTS, STEPS):
        for page in obstore.list(store, prefix=prefix, chunk_size=PAGE_FILES):
            yield {meta["path"]: meta for meta in page if _may_have_row(meta["path"])}


def _steps_needed(session: Session) -> Callable[[str], bool]:
    """Return whether a file of steps without a row may be needed, by its key.

    By a backup that has read an earlier row; or the run lacks steps, whose record was deleted while
    the file was missing.
    """
    if is_backup_running(session):
        return lambda key: True

    def lacks_steps(key: str) -> bool:
        number = key.split("/")[1]
        run = session.get(Run, int(number)) if number.isdecimal() and len(number) < 19 else None
        if run is None or session.scalar(
            select(FrozenSteps.id).where(FrozenSteps.run_id == run.id)
        ):
            return False
        rows = session.scalar(select(func.count()).where(Step.run_id == run.id)) or 0
        return rows < pyramid.count_steps(session.connection(), run.id)

    return lacks_steps


def is_backup_running(session: Session) -> bool:
    """Return whether a backup may still copy files whose rows have changed since."""
    return session.scalar(select(Backup.id).where(IS_RUNNING).limit(1)) is not None


def is_recent(file: "ObjectMeta") -> bool:
    """Return whether a file was stored within ORPHAN_SECONDS."""
    return file["last_modified"].timestamp() > time.time() - ORPHAN_SECONDS


def _is_new(file: "ObjectMeta") -> bool:
    """Return whether the row of content may not be committed yet."""
    has_late_row = file["path"].startswith((f"{BLOBS}/", f"{REPORTS}/", f"{STEPS}/"))
    return has_late_row and is_recent(file)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _may_have_row(key: str) -> bool:
    if key.startswith(f"{BLOBS}/"):
        return not key.startswith(f"{BLOBS}/{INCOMING}/")
    return key.startswith((f"{REPORTS}/", f"{STEPS}/")) or any(part in key for part in FOLDERS)


def _rows(session: Session, keys: Collection[str]) -> list[Checked]:
    """Return the rows that name any of these keys, which contain the run's id."""
    numbers = {key.partition("/")[2].partition("/")[0] for key in keys}
    run_ids = [int(number) for number in numbers if number.isdecimal() and len(number) < 19]
    rows: list[Checked] = []
    for table in (CheckpointFile, Artifact, FrozenSteps):
        query = select(table).where(table.run_id.in_(run_ids), table.key.in_(keys))
        rows += session.scalars(query)
    rows += session.scalars(select(Blob).where(Blob.key.in_(keys)))
    rows += session.scalars(select(ReportImage).where(ReportImage.key.in_(keys)))
    return rows


def _unseen(session: Session, table: type[Checked], seen: set[int]) -> list[Checked]:
    """Return the rows of stored files, except those with the given ids."""
    stored = select(table.id).where(table.key != "").order_by(table.id)
    ids = session.scalars(stored.execution_options(yield_per=PAGE_FILES))
    unseen = [row_id for row_id in ids if row_id not in seen]
    rows: list[Checked] = []
    for first in range(0, len(unseen), PAGE_FILES):
        rows += session.scalars(select(table).where(table.id.in_(unseen[first:][:PAGE_FILES])))
    return rows


def _problem(store: ObjectStore, row: Checked, size_bytes: int, *, deep: bool) -> str | None:
    if size_bytes != row.size_bytes:
        return f"the file has {size_bytes} bytes, not the recorded {row.size_bytes}"
    if deep and sha256_of(store, row.key) != row.sha256:
        return "the file is altered: its SHA-256 differs"
    return None


def sha256_of(store: ObjectStore, key: str, copy: IO[bytes] | None = None) -> str:
    """Return the SHA-256 of a file's content. copy: receives the content."""
    digest = hashlib.sha256()
    for chunk in obstore.get(store, key):
        digest.update(chunk)
        if copy:
            copy.write(chunk)
    return digest.hexdigest()
