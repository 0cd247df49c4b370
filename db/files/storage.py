"""Rows of stored files, compared with the files: missing, damaged and unnamed ones."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore.store import LocalStore, ObjectStore
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.errors import Conflict
from db.files.object_store import PAGE_FILES, delete_files, sha256_of
from db.files.step_files import STEPS
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
)
from db.telemetry import step_blocks
from halfstep.number_formats import count

if TYPE_CHECKING:
    from obstore import ObjectMeta

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
#: Bytes of a run's files that are read to find altered ones.
MOST_READ_BYTES = 64 * 2**20
#: Files that a sentence names.
MOST_NAMED = 3
#: Files of an artifact's version that its page looks up, each by a request to a bucket.
MOST_LOOKED_UP, LOOKED_UP_AT_ONCE = 200, 20
#: Age from which content without a row is an orphan: before, its row may not be committed.
ORPHAN_SECONDS = 3600.0
#: Whether a backup runs, which reports it every minute, or was killed just now.
IS_RUNNING = Backup.ended_at.is_(None) & (Backup.seen_at > now() - ORPHAN_SECONDS)


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
    seen: dict[type[Checked], set[int]] = {
        table: set() for table in (CheckpointFile, Artifact, FrozenSteps, Blob, ReportImage)
    }
    for files in _pages(store):
        rows = _rows(session, files)
        for row in rows:
            seen[type(row)].add(row.id)
            if problem := _problem(store, row, files[row.key]["size"], deep=deep):
                result.append(Mismatch(row.key, f"{problem}{_name_uses(session, row)}", row))
        unnamed = files.keys() - {row.key for row in rows}
        orphans += [
            key for key in unnamed if not key.startswith(skipped) and not _is_new(files[key])
        ]
    for table in seen:
        for row in _unseen(session, table, seen[table]):
            result.append(Mismatch(row.key, f"the file is missing{_name_uses(session, row)}", row))
    is_needed = _steps_needed(session)
    orphans = sorted(key for key in orphans if not (key.startswith(f"{STEPS}/") and is_needed(key)))
    return result + [Mismatch(key, "no row names the file", None) for key in orphans]


def _name_uses(session: Session, row: Checked) -> str:
    """Return the files of artifacts that have this content; of other rows the key says it."""
    if not isinstance(row, Blob):
        return ""
    version = ArtifactVersion.id == ArtifactEntry.version_id
    query = select(ArtifactCollection.name, ArtifactVersion.number, ArtifactEntry.path)
    query = query.join(ArtifactVersion, ArtifactVersion.collection_id == ArtifactCollection.id)
    query = query.join(ArtifactEntry, version).where(ArtifactEntry.blob_id == row.id)
    uses = session.execute(query.order_by(ArtifactVersion.id).limit(MOST_NAMED + 1)).all()
    named = [f"{name}:v{number}/{path}" for name, number, path in uses[:MOST_NAMED]]
    return f" ({', '.join(named)}{', …' if len(uses) > MOST_NAMED else ''})" if named else ""


class DamagedFile(NamedTuple):
    """A file of a run that is missing or damaged."""

    kind: str  # checkpoint or artifact
    step: int
    key: str
    problem: str

    @property
    def text(self) -> str:
        """What it is, and what is wrong with it."""
        kind = "log" if "/log/" in self.key else f"{self.kind} of step {count(self.step)}"
        return f"{kind} ({Path(self.key).name}): {self.problem}"


def find_damaged_files(
    session: Session, store: ObjectStore, run_id: int, *, reads: bool = True
) -> list[DamagedFile]:
    """Return the files of a run that are missing, have another size, or are altered.

    reads: MOST_READ_BYTES of those in the data folder are compared with their SHA-256.
    """
    rows: list[CheckpointFile | Artifact] = []
    for table in (CheckpointFile, Artifact):
        its = (table.run_id == run_id, table.key != "")
        rows += session.scalars(select(table).where(*its).order_by(table.step))
    if not rows:
        return []
    pages = obstore.list(store, prefix=f"runs/{run_id}", chunk_size=PAGE_FILES)
    sizes = {meta["path"]: meta["size"] for page in pages for meta in page}
    found, left = [], MOST_READ_BYTES if reads and isinstance(store, LocalStore) else -1
    for row in rows[::-1]:  # the last checkpoints are resumed from
        size, is_read = sizes.get(row.key), row.size_bytes <= left
        left -= row.size_bytes if is_read else 0
        problem = "the file is missing"
        if size is not None:
            problem = _problem(store, row, size, deep=is_read) or ""
        if problem:
            kind = "checkpoint" if isinstance(row, CheckpointFile) else "artifact"
            found.append(DamagedFile(kind, row.step, row.key, problem))
    return found[::-1]


def describe_damaged_files(run_id: int, some: Sequence[DamagedFile]) -> str:
    """Return which files are damaged, in words; empty if none are."""
    if not some:
        return ""
    more = f" and {count(len(some) - MOST_NAMED)} more files" if len(some) > MOST_NAMED else ""
    named = ", ".join(file.text for file in some[:MOST_NAMED])
    return f"Damaged files of run {run_id}: {named}{more}."


def list_lost_entries(session: Session, store: ObjectStore, version_id: int) -> list[str]:
    """Return the paths of files of an artifact's version that are missing; of MOST_LOOKED_UP."""
    query = select(ArtifactEntry.path, Blob.key).join(Blob, Blob.id == ArtifactEntry.blob_id)
    its = query.where(ArtifactEntry.version_id == version_id).order_by(ArtifactEntry.path)
    rows = session.execute(its.limit(MOST_LOOKED_UP)).all()
    with ThreadPoolExecutor(LOOKED_UP_AT_ONCE) as pool:
        there = pool.map(lambda row: _may_be_there(store, row.key), rows)
        return [row.path for row, is_there in zip(rows, there, strict=True) if not is_there]


def _may_be_there(store: ObjectStore, key: str) -> bool:
    """Return False if a file is missing; a bucket that does not answer may have it."""
    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    except obstore.exceptions.BaseError:
        return True
    return True


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
            f"The storage has no file of steps, but {recorded:,} are recorded: check that "
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
        connection = session.connection()
        return step_blocks.count(connection, run.id) < step_blocks.count_summarized_steps(
            connection, run.id
        )

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
