"""Deleted runs: hidden, restored, and erased permanently."""

from pathlib import Path
from threading import Event, Thread

import obstore
import pytest
from obstore.store import LocalStore
from sqlalchemy import Connection, delete, event, func, insert, select, update

from db.database import Database
from db.errors import Conflict, Ended, Invalid, NotFound
from db.files import checkpoints, erasure
from db.files.object_store import open_store
from db.queue import queue, run_control
from db.runs import groups, runs, trash
from db.settings import Settings
from db.tables import (
    ArtifactCollection,
    ArtifactVersion,
    Channel,
    Run,
    SharedLink,
    Status,
    Step,
    StepBlock,
    StepBucket,
    SystemSample,
    User,
)
from db.telemetry import ingest
from tests.db.conftest import config, submit
from tests.db.files.checkpoints_made import make_saved
from tests.db.migrations_made import a_value
from tests.db.runs.trash_made import WATCHED, move_to_trash
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record
from tests.spool_made import checkpoint_of


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(data=tmp_path / "data", database_url=database_url)


@pytest.fixture
def ended(database: Database, running: Run) -> int:
    """A finished run with rows of every kind, and its files."""
    skipped = [3, 7]
    events = [*make_events(skipped), *(make_metric(step, 0.5) for step in range(10, 100, 10))]
    record(database, running, make_steps([1.0] * 100, skipped=skipped), events=events)
    with database.writing() as session:
        checkpoints.publish(
            session,
            running.id,
            1,
            checkpoint_of(make_saved(10)),
            [f"runs/{running.id}/{make_saved(10)}"],
        )
        queue.end(session, running.id, 1, Status.FINISHED)
    return running.id


def erase_now(database: Database, settings: Settings, ada: User, run_id: int) -> None:
    move_to_trash(database, ada, run_id)
    with database.writing() as session:
        trash.erase(session, run_id, ada)
    erasure.erase(database, settings, open_store(settings), run_id, Event())


def rows_left(database: Database, run_id: int) -> int:
    with database.reading() as session:
        return sum(
            session.scalar(select(func.count()).where(table.c.run_id == run_id)) or 0
            for table in erasure.tables()
        )


def test_a_deleted_run_is_out_of_every_list(database: Database, ended: int, ada: User) -> None:
    """A deleted run is in the trash only, and in no list, count or group, until it is restored."""
    with database.writing() as session:
        other = submit(session, ada)
        groups.join(session, other, ended)
    move_to_trash(database, ada, ended)
    move_to_trash(database, ada, ended)  # once more changes nothing
    with database.reading() as session:
        assert [run.id for run, _owner in runs.newest(session)] == [other.id]
        assert runs.count(session) == 1
        assert runs.with_owners(session, [ended]) == []
        assert [run.id for run, _owner in groups.members(session, ended)] == [other.id]
        assert runs.newest_id(session) == other.id
        with pytest.raises(NotFound, match="in the trash"):
            runs.get(session, ended)
        [(binned, owner)] = trash.list_runs(session, limit=10).rows
        assert (binned.id, owner) == (ended, "ada")
        assert trash.contents(session) == trash.Contents(1, 10)
    with database.writing() as session:
        trash.restore(session, ended, ada)
        trash.restore(session, ended, ada)
    with database.reading() as session:
        assert len(runs.newest(session)) == 2
        assert [row.reason for row in runs.statuses(session, ended)][-2:] == [
            "deleted by ada",
            "restored by ada",
        ]
        assert trash.contents(session) == trash.Contents(0, 0)


def test_only_an_ended_run_is_deleted(database: Database, running: Run, ada: User) -> None:
    """An active run must be cancelled before it is deleted, as the message says."""
    with pytest.raises(Conflict, match=r"is running.*Cancel it first"):
        move_to_trash(database, ada, running.id)


def test_a_checkpoint_that_a_run_starts_from_is_kept(
    database: Database, ended: int, ada: User
) -> None:
    """A run cannot be deleted while an active fork needs its checkpoint or weights."""
    place = {"parent_id": ended, "parent_step": 10}
    with database.writing() as session:
        by_fork = submit(session, ada, config=config(200), **place)
        weights = {"run": ended, "step": 10}
        by_weights = submit(session, ada, config=config() | {"weights": weights})
    for fork in (by_fork, by_weights):
        with pytest.raises(Conflict, match=rf"run {fork.id} \(queued\) starts from its"):
            move_to_trash(database, ada, ended)
        with database.writing() as session:
            run_control.cancel(session, fork.id, ada)
    move_to_trash(database, ada, ended)


def test_nothing_new_refers_to_a_deleted_run(database: Database, ended: int, ada: User) -> None:
    """A deleted run cannot be a new run's parent, dependency or comparison."""
    move_to_trash(database, ada, ended)
    for changes in (
        {"parent_id": ended, "parent_step": 10, "config": config(200)},
        {"after_id": ended},
    ):
        with pytest.raises(Invalid, match="is in the trash"), database.writing() as session:
            submit(session, ada, **changes)
    with pytest.raises(Invalid, match="is in the trash"), database.writing() as session:
        groups.join(session, submit(session, ada), ended)


def test_a_watched_run_in_the_trash_takes_nothing(database: Database, ada: User) -> None:
    """The script of a deleted run is refused; once that is erased, it begins another run."""
    with database.writing() as session:
        run_id = ingest.begin(session, ada, "a" * 32, 1, **WATCHED).run_id
        ingest.end(session, ada, run_id, 1, "finished", step=0, error=None)
    move_to_trash(database, ada, run_id)
    with pytest.raises(Ended, match="in the trash"), database.writing() as session:
        ingest.begin(session, ada, "a" * 32, 2, **WATCHED)
    with pytest.raises(Ended, match="in the trash"), database.writing() as session:
        ingest.lock_attempt(session, ada, run_id, 1)


def test_a_run_is_erased_with_all_its_rows(
    database: Database, settings: Settings, ended: int, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An erased run's rows are deleted from each table in small batches, and no other run's."""
    monkeypatch.setattr(erasure, "BATCH_ROWS", 7)
    filled = set()
    with database.writing() as session:
        other = submit(session, ada)
        session.execute(
            insert(Channel).values(user_id=1, name="", kind="", target="", ciphertext="")
        )
        session.execute(insert(SharedLink).values(user_id=1, token_hash="", expires_at=1.0))
        collection = ArtifactCollection(project="", name="a", type="t")
        session.add(collection)
        session.flush()
        version = {"collection_id": collection.id, "number": 0, "digest": "", "size_bytes": 0}
        session.add(ArtifactVersion(**version, files=0, is_file=False, new_aliases=[], user_id=1))
        session.flush()
        for run_id in (ended, other.id):
            for table in erasure.tables():
                row = {column.name: a_value(column) for column in table.columns}
                row |= {"run_id": run_id, "attempt": 9, "step": 999, "bucket": 99, "first": 999}
                row |= {
                    "rule_id": None,
                    "alert_id": None,
                }  # tests/db/alerts/test_alert_evaluation.py has these
                row |= {"token_hash": f"of a token of run {run_id}"}
                row |= {"time": 1.0} if "time" in row else {}
                row = {name: value for name, value in row.items() if name in table.columns}
                if "id" in row:
                    del row["id"]
                if table.primary_key.columns.keys() == ["run_id"]:
                    session.execute(delete(table).where(table.c.run_id == run_id))
                session.execute(insert(table).values(row))
                filled.add(table.name)
    before = rows_left(database, other.id)
    assert len(filled) == 30
    erase_now(database, settings, ada, ended)
    assert rows_left(database, ended) == 0
    assert rows_left(database, other.id) == before
    with database.reading() as session:
        run = session.get_one(Run, ended)
        assert (run.name, run.config, run.stored_bytes) == ("", {}, 0)
        assert run.erased_at is not None
        assert trash.contents(session).runs == 0
        with pytest.raises(NotFound, match="permanently"):
            runs.get(session, ended)
    for act in (trash.restore, trash.delete, trash.erase):
        with pytest.raises(NotFound, match="permanently"), database.writing() as session:
            act(session, ended, ada)


def test_its_number_is_never_given_again(
    database: Database, settings: Settings, ended: int, ada: User
) -> None:
    """The id of an erased run, even the newest, is not used again."""
    erase_now(database, settings, ada, ended)
    with database.writing() as session:
        assert submit(session, ada).id == ended + 1


def test_forks_outlive_their_parent(
    database: Database, settings: Settings, ended: int, ada: User
) -> None:
    """An ended fork still names its parent and step."""
    with database.writing() as session:
        fork = submit(session, ada, config=config(200), parent_id=ended, parent_step=10)
        waiting = submit(session, ada, after_id=ended)
        groups.join(session, fork, ended)
        run_control.cancel(session, fork.id, ada)
    erase_now(database, settings, ada, ended)
    with database.reading() as session:
        run = runs.get(session, fork.id)
        assert (run.parent_id, run.parent_step, run.group_id) == (ended, 10, ended)
        assert [member.id for member, _owner in groups.members(session, ended)] == [fork.id]
        assert checkpoints.to_resume(session, run) == []
        assert runs.get(session, waiting.id).after_id == ended


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_files_go_wherever_they_are(
    database: Database, settings: Settings, ended: int, ada: User, tmp_path: Path, place: str
) -> None:
    """A run's folder and stored files are deleted, with and without rows, and no other run's."""
    store = open_store(settings)
    if place == "bucket":
        store = LocalStore(tmp_path / "bucket", mkdir=True)
        settings = settings.model_copy(update={"storage_url": (tmp_path / "bucket").as_uri()})
    for run_id in (ended, ended * 10):
        for name in ("checkpoints/step-00000010.pt", "artifacts/step-00000010/a.txt"):
            obstore.put(store, f"runs/{run_id}/{name}", b"x")
        (settings.run_folder(run_id) / "spool").mkdir(parents=True)
        (settings.run_folder(run_id) / "spool" / "1-0.spool").write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (settings.run_folder(ended) / "link").symlink_to(outside)
    move_to_trash(database, ada, ended)
    with database.writing() as session:
        trash.erase(session, ended, ada)
    for _again in range(2):
        erasure.erase(database, settings, store, ended, Event())
    left = [meta["path"] for page in obstore.list(store, prefix="runs") for meta in page]
    assert sorted({path.split("/")[1] for path in left}) == [str(ended * 10)]
    assert not settings.run_folder(ended).exists()
    assert settings.run_folder(ended * 10).exists()
    assert outside.exists()


def test_only_due_runs_are_purged(
    database: Database, settings: Settings, ended: int, ada: User
) -> None:
    """Runs are purged after days by the database's clock; restored runs stay."""
    move_to_trash(database, ada, ended)
    with database.writing() as session:
        assert erasure.due(session, 7.0) == []
        back = Run.deleted_at - 7 * trash.DAY_SECONDS
        session.execute(update(Run).where(Run.id == ended).values(deleted_at=back))
        assert erasure.due(session, 7.0) == [ended]
        trash.restore(session, ended, ada)
    before = rows_left(database, ended)
    erasure.erase(database, settings, open_store(settings), ended, Event())
    assert rows_left(database, ended) == before
    with database.reading() as session:
        assert runs.get(session, ended).erased_at is None


def test_a_run_being_purged_is_not_restored(database: Database, ended: int, ada: User) -> None:
    """A partly purged run cannot be restored."""
    move_to_trash(database, ada, ended)
    with database.writing() as session:
        trash.erase(session, ended, ada)
    with pytest.raises(Conflict, match="no longer be restored"), database.writing() as session:
        trash.restore(session, ended, ada)
    with database.reading() as session:
        assert erasure.due(session, 7.0) == [ended]


class CutOff:
    """A connection that is lost at a commit, after some successful ones."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, _connection: Connection) -> None:
        self._left -= 1
        if self._left < 0:
            raise ConnectionAbortedError


@pytest.mark.slow
def test_stopped_anywhere_it_continues(
    database: Database,
    settings: Settings,
    ended: int,
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An erasure cut off at any transaction completes later, and only then the run is gone."""
    monkeypatch.setattr(erasure, "BATCH_ROWS", 40)
    move_to_trash(database, ada, ended)
    with database.writing() as session:
        trash.erase(session, ended, ada)
    cuts = 0
    while True:
        cut = CutOff(after=cuts)
        event.listen(database._writer, "commit", cut)
        try:
            erasure.erase(database, settings, open_store(settings), ended, Event())
            break
        except ConnectionAbortedError:
            cuts += 1
            with database.reading() as session:
                assert erasure.due(session, 7.0) == [ended]
        finally:
            event.remove(database._writer, "commit", cut)
    assert cuts > len(erasure.tables())
    assert rows_left(database, ended) == 0


def test_it_stops_on_request(
    database: Database,
    settings: Settings,
    ended: int,
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An erasure stops on request, so that a server can stop."""
    monkeypatch.setattr(erasure, "BATCH_ROWS", 1)
    move_to_trash(database, ada, ended)
    stopping = Event()
    stopping.set()
    with pytest.raises(erasure.Stopped):
        erasure.erase(database, settings, open_store(settings), ended, stopping)
    assert rows_left(database, ended) > 0
    with database.reading() as session:
        assert erasure.due(session, 7.0) == [ended]


def test_others_write_while_a_run_is_erased(
    database: Database,
    settings: Settings,
    ended: int,
    ada: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other writers get their turn between two batches of an erasure, and two erasures agree."""
    monkeypatch.setattr(erasure, "BATCH_ROWS", 3)
    move_to_trash(database, ada, ended)
    with database.writing() as session:
        trash.erase(session, ended, ada)
    store, failed = open_store(settings), []

    def erase() -> None:
        try:
            erasure.erase(database, settings, store, ended, Event())
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=erase) for _ in range(2)]
    for thread in threads:
        thread.start()
    submitted = 0
    while any(thread.is_alive() for thread in threads):
        with database.writing() as session:
            submit(session, ada)
        submitted += 1
        threads[0].join(0.005)  # SQLite lets those who wait for its lock starve
    for thread in threads:
        thread.join()
    assert failed == []
    assert submitted > 1
    assert rows_left(database, ended) == 0
    with database.reading() as session:
        for table in (Step, StepBlock, StepBucket, SystemSample):
            assert session.scalar(select(func.count()).select_from(table)) == 0
