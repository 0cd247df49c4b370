"""Versions of named artifacts: equal content makes no new version, and used ones are kept."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.access import accounts, projects
from db.database import Database
from db.errors import Conflict, Invalid, NotFound
from db.files import artifact_versions as artifacts
from db.files import backup, storage
from db.queue import queue, quotas
from db.tables import (
    LARGEST_COUNT,
    MADE,
    USED,
    ArtifactAlias,
    ArtifactLink,
    ArtifactVersion,
    Blob,
    Run,
    Status,
    User,
)
from db.tables import Table as Base
from halfstep.artifacts.manifest import Entry, digest_of
from halfstep.artifacts.names import Version
from halfstep.telemetry import events
from tests.db.conftest import is_blocked, make_watched
from tests.marks import looped

A, B, C = (Entry(f"{name}.txt", size, name * 64) for name, size in (("a", 1), ("b", 2), ("c", 3)))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", mkdir=True)


def save(
    database: Database, user: User, *entries: Entry, project: str = "", **more: object
) -> ArtifactVersion:
    """Save a version of `data` without a run."""
    with database.writing() as session:
        options = {"type": "dataset", "entries": entries, **more}
        return artifacts.save(session, user, project, "data", **options)  # type: ignore[arg-type]


def upload(
    database: Database, store: LocalStore, version: ArtifactVersion, *entries: Entry
) -> None:
    """Store content of a version."""
    for entry in entries:
        key = artifacts.new_key(entry.sha256)
        obstore.put(store, key, b"x" * entry.size_bytes)
        with database.writing() as session:
            artifacts.store_blob(
                session, entry.sha256, entry.size_bytes, key, version_id=version.id
            )


def found(database: Database, version: Version, project: str = "") -> int:
    """Return the number of the version with this alias, digest or number."""
    with database.reading() as session:
        return artifacts.find(session, project, "data", version)[0].number


def test_a_version_is_complete_with_its_last_file(
    database: Database, ada: User, store: LocalStore
) -> None:
    """A version is found by aliases and digest only once its last file is stored."""
    version = save(database, ada, A, B, aliases=["best"])
    upload(database, store, version, A)
    with pytest.raises(NotFound, match="no artifact data:latest"):
        found(database, Version(alias="latest"))
    upload(database, store, version, B)
    assert found(database, Version(alias="latest")) == found(database, Version(alias="best")) == 0
    assert found(database, Version(digest=digest_of([B, A])[:12])) == 0
    assert found(database, Version(number=0)) == 0


def test_the_same_content_makes_no_version(
    database: Database, ada: User, store: LocalStore
) -> None:
    """Equal content is the same version, which becomes `latest` again."""
    first = save(database, ada, A)
    upload(database, store, first, A)
    second = save(database, ada, A, B)
    assert second.number == 1
    upload(database, store, second, B)  # the project has the other file
    assert found(database, Version(alias="latest")) == 1
    again = save(database, ada, A)
    assert (again.id, again.number) == (first.id, 0)
    assert found(database, Version(alias="latest")) == 0


def store_blob(session: Session, version: ArtifactVersion, entry: Entry) -> None:
    """Record a file of a version as stored."""
    key = artifacts.new_key(entry.sha256)
    artifacts.store_blob(session, entry.sha256, entry.size_bytes, key, version_id=version.id)


def while_open(
    database: Database, first: Callable[[Session], object], second: Callable[[Session], object]
) -> None:
    """Run a second transaction until it ends or waits for the first one's lock; commit both."""

    def work() -> None:
        with database.writing() as session:
            second(session)

    with ThreadPoolExecutor() as pool:
        with database.writing() as session:
            first(session)
            session.flush()
            other = pool.submit(work)
            while not is_blocked(database) and not other.done():
                pass
        other.result()


@pytest.mark.only_on("postgresql")
def test_the_last_two_files_that_are_stored_concurrently_complete_a_version(
    database: Database, ada: User
) -> None:
    """Two files stored concurrently complete a version, though neither sees the other stored."""
    version = save(database, ada, A, B)
    while_open(
        database,
        lambda session: store_blob(session, version, A),
        lambda session: store_blob(session, version, B),
    )
    assert found(database, Version(alias="latest")) == 0


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize("later_first", [False, True])
def test_latest_is_the_later_of_two_versions_that_are_completed_concurrently(
    database: Database, ada: User, later_first: bool
) -> None:
    """Of two versions completed concurrently the higher number is `latest`, in either order."""
    older, later = save(database, ada, A), save(database, ada, B)
    steps = [
        lambda session: store_blob(session, older, A),
        lambda session: store_blob(session, later, B),
    ]
    while_open(database, *(reversed(steps) if later_first else steps))
    assert found(database, Version(alias="latest")) == 1


@pytest.mark.only_on("postgresql")
def test_a_version_that_is_deleted_while_its_last_file_is_stored_stays_incomplete(
    database: Database, ada: User
) -> None:
    """A version deleted while its last file is stored stays incomplete and has no alias."""
    version = save(database, ada, A)
    while_open(
        database,
        lambda session: artifacts.remove(session, version.id),
        lambda session: store_blob(session, version, A),
    )
    with database.reading() as session:
        assert artifacts.get(session, version.id)[0].completed_at is None
        assert session.scalars(select(ArtifactAlias)).all() == []


def test_a_hash_gives_no_access_to_another_project(
    database: Database, ada: User, store: LocalStore
) -> None:
    """A hash gives another project no access: it uploads the file, which is stored once."""
    with database.writing() as session:
        projects.make(session, "other")
    upload(database, store, save(database, ada, A), A)
    stolen = save(database, ada, A, project="other")
    with pytest.raises(NotFound):
        found(database, Version(alias="latest"), "other")
    upload(database, store, stolen, A)
    with database.reading() as session:
        assert len(session.scalars(select(Blob)).all()) == 1
        assert quotas.artifact_bytes(session, ["", "other"]) == {"": 1, "other": 1}


def test_what_a_version_refers_to_is_never_collected(
    database: Database, ada: User, store: LocalStore
) -> None:
    """Content is deleted with the last version that has it; a deleted version keeps its row."""
    first, second = save(database, ada, A, B), save(database, ada, B, C)
    upload(database, store, first, A, B)
    upload(database, store, second, B, C)
    assert artifacts.collect_blobs(database, store) == 0
    with database.writing() as session:
        artifacts.remove(session, second.id)
    assert found(database, Version(alias="latest")) == 0
    assert artifacts.collect_blobs(database, store) == 1
    stored = [meta["path"] for page in obstore.list(store) for meta in page]
    with database.reading() as session:
        keys = set(session.scalars(select(Blob.key)))
        assert keys <= set(stored)
        assert {blob.sha256 for blob in session.scalars(select(Blob))} == {A.sha256, B.sha256}
    with pytest.raises(NotFound, match="data:v1 in Default project is deleted"):
        found(database, Version(number=1))
    assert save(database, ada, B, C).number == 2


def use(database: Database, ada: User, key: str, version: ArtifactVersion) -> int:
    """Begin a watched run that uses a version."""
    with database.writing() as session:
        run_id = make_watched(session, ada, key).run_id
        run = session.get_one(Run, run_id)
        event = events.UsedArtifact(project="", name="data", digest=version.digest)
        artifacts.use_by_run(session, run, event)
        artifacts.use_by_run(session, run, event)  # a repeated upload
    return run_id


def test_a_version_in_use_is_not_deleted(database: Database, ada: User, store: LocalStore) -> None:
    """A version used by an active run cannot be deleted, and afterwards only by force."""
    version = save(database, ada, A)
    upload(database, store, version, A)
    run_id = use(database, ada, "1" * 32, version)
    with database.writing() as session, pytest.raises(Conflict, match="which has not ended"):
        artifacts.remove(session, version.id, force=True)
    with database.writing() as session:
        queue.end(session, run_id, 1, Status.FINISHED)
    with database.writing() as session, pytest.raises(Conflict, match=f"used by runs {run_id}"):
        artifacts.remove(session, version.id)
    with database.writing() as session:
        artifacts.remove(session, version.id, force=True)
        [link] = session.scalars(select(ArtifactLink))
        assert (link.run_id, link.role) == (run_id, USED)


def test_a_run_makes_versions_and_uses_what_its_owner_may_see(
    database: Database, ada: User, store: LocalStore
) -> None:
    """A run saves versions in its project, and cannot use those hidden from its owner."""
    upload(database, store, version := save(database, ada, A), A)
    with database.writing() as session:
        eve = accounts.make_user(session, "eve")
        projects.make(session, "hers")
        projects.set_role(session, eve, "hers", "member")
    with database.writing() as session:
        run = session.get_one(Run, make_watched(session, eve, project="hers").run_id)
        file = events.ArtifactFile(
            name=B.path, path=f"blobs/{B.sha256}", size_bytes=2, sha256=B.sha256
        )
        made = events.SavedArtifact(
            name="data", type="dataset", digest=digest_of([B]), is_file=True, files=[file]
        )
        artifacts.save_of_run(session, run, made)
        event = events.UsedArtifact(project="", name="data", digest=version.digest)
        with pytest.raises(NotFound):
            artifacts.use_by_run(session, run, event)
        [link] = session.scalars(select(ArtifactLink))
        assert (link.run_id, link.role) == (run.id, MADE)
        assert not artifacts.is_stored(session, B.sha256, 2, run_id=run.id)
        with pytest.raises(NotFound):
            artifacts.is_stored(session, A.sha256, 1, run_id=run.id)


def test_differences_are_of_files(database: Database, ada: User) -> None:
    """Differences of two versions list added, removed and changed files by path."""
    first = save(database, ada, A, B)
    second = save(database, ada, A._replace(sha256="f" * 64, size_bytes=9), C)
    with database.reading() as session:
        changes = artifacts.diff(session, first.id, second.id)
    assert [(each.path, each.kind) for each in changes] == [
        ("a.txt", "changed"),
        ("b.txt", "removed"),
        ("c.txt", "added"),
    ]
    assert (changes[0].size_before, changes[0].size_after) == (1, 9)


@looped(
    "entries, problem",
    [
        ([A._replace(path="../a")], "relative path"),
        ([A._replace(path="/etc/passwd")], "relative path"),
        ([A._replace(path="a\\b")], "relative path"),
        ([A, A], "the same path"),
        ([A, B._replace(path="a.txt/b")], "is a file, and a folder"),
        ([], "allowed: 1 to 10,000"),
    ],
)
def test_paths_that_lead_elsewhere_are_rejected(
    database: Database, ada: User, entries: list[Entry], problem: str
) -> None:
    """An artifact with a path out of its folder is rejected, and no part of it is saved."""
    with pytest.raises(Invalid, match=problem):
        save(database, ada, *entries)
    with database.reading() as session:
        assert session.scalars(select(ArtifactVersion)).all() == []


def test_a_sum_of_sizes_that_no_column_holds_is_rejected(database: Database, ada: User) -> None:
    """A total size beyond the column's range is rejected, although each file's size is allowed."""
    huge = [entry._replace(size_bytes=LARGEST_COUNT) for entry in (A, B)]
    with pytest.raises(Invalid, match="allowed: at most"):
        save(database, ada, *huge)


def test_a_digest_names_the_version_that_is_left(
    database: Database, ada: User, store: LocalStore
) -> None:
    """A digest prefix selects the remaining version rather than a deleted one."""
    upload(database, store, left := save(database, ada, A), A)
    upload(database, store, gone := save(database, ada, B), B)
    with database.writing() as session:
        session.get_one(ArtifactVersion, gone.id).digest = f"{left.digest[:8]}{gone.digest[8:]}"
        artifacts.remove(session, gone.id)
    assert found(database, Version(digest=left.digest[:8])) == 0


def test_an_artifact_has_one_type(database: Database, ada: User) -> None:
    """An artifact's type cannot change; another type needs another name."""
    save(database, ada, A)
    with pytest.raises(Invalid, match="has the type 'dataset'"):
        save(database, ada, B, type="model")


def test_lost_content_is_found_and_saved_again(
    database: Database, ada: User, store: LocalStore
) -> None:
    """Content found lost by `storage check --mend` makes its version incomplete until uploaded
    again.
    """
    version = save(database, ada, A, B)
    upload(database, store, version, A, B)
    with database.reading() as session:
        assert storage.mismatches(session, store) == []
        obstore.delete(store, artifacts.blob_of(session, version.id, A.path).key)
        mismatched = storage.mismatches(session, store)
        name = artifacts.get(session, version.id)[1].name
    named = f"the file is missing ({name}:v0/{A.path})"
    assert [each.problem for each in mismatched] == [named]
    storage.mend(database, store, mismatched)
    with database.reading() as session:
        assert artifacts.get(session, version.id)[0].completed_at is None
    again = save(database, ada, A, B)
    assert (again.id, again.completed_at) == (version.id, None)
    upload(database, store, again, A)
    with database.reading() as session:
        assert artifacts.get(session, version.id)[0].completed_at is not None


def test_a_backup_has_artifacts_and_leaves_out_what_is_damaged(
    database: Database, ada: User, store: LocalStore, tmp_path: Path
) -> None:
    """A backup leaves out damaged content, and after a restore its version is incomplete."""
    entries = [
        Entry(name, len(name), hashlib.sha256(name.encode()).hexdigest()) for name in ("x", "yy")
    ]
    for entry in entries:
        version = save(database, ada, entry)
        key = artifacts.new_key(entry.sha256)
        obstore.put(store, key, entry.path.encode())
        with database.writing() as session:
            identity = (entry.sha256, entry.size_bytes)
            artifacts.store_blob(session, *identity, key, version_id=version.id)
    obstore.put(store, key, b"damaged")
    summary = backup.back_up(database, store, tmp_path / "backup")
    assert summary["left_out"] == [key]
    with database.writing() as session:  # as in an empty database
        for table in reversed(Base.metadata.sorted_tables):
            session.execute(table.delete())
    backup.restore(database, store, tmp_path / "backup")
    with database.reading() as session:
        rows = session.scalars(select(ArtifactVersion).order_by(ArtifactVersion.id))
        assert [row.completed_at is not None for row in rows] == [True, False]


@pytest.mark.only_on("postgresql")
def test_a_version_whose_content_is_lost_is_not_completed_meanwhile(
    database: Database, ada: User, store: LocalStore
) -> None:
    """A version whose content `storage check --mend` finds lost is not completed meanwhile."""
    version = save(database, ada, A, B)
    upload(database, store, version, A)
    with database.reading() as session:
        [blob] = session.scalars(select(Blob))
    lost = [storage.Mismatch(blob.key, "the file is missing", blob)]
    while_open(
        database,
        lambda session: storage._delete_rows(session, lost),
        lambda session: store_blob(session, version, B),
    )
    with database.reading() as session:
        assert session.get_one(ArtifactVersion, version.id).completed_at is None
