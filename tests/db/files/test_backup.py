"""Backups, and repairs of storage mismatches."""

import hashlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore
from sqlalchemy import Column, delete, select

from db.access import accounts, audit, shared_links
from db.alerts import deliveries
from db.database import Database
from db.errors import Conflict, Invalid, InvalidCredentials
from db.files import artifacts, backup, checkpoints, storage, uploads
from db.files.backup import back_up, restore
from db.files.storage import mend, mismatches
from db.queue import queue
from db.runs import config_values, history, runs
from db.tables import (
    Backup,
    Channel,
    CheckpointFile,
    Delivery,
    FrozenSteps,
    Run,
    Status,
    Table,
    User,
)
from db.telemetry import series, step_conversion, step_rows, telemetry
from halfstep.telemetry.spool import STEP_DTYPE
from tests.db.conftest import submit
from tests.db.files.backup_made import contents, empty_database
from tests.db.telemetry import earlier_metrics
from tests.db.telemetry.earlier_steps import as_rows
from tests.db.telemetry.telemetry_made import make_metric, make_steps, read_logged_points, record
from tests.spool_made import artifact_of, checkpoint_of

pytestmark = pytest.mark.slow

CHECKPOINT, ARTIFACT = "runs/1/checkpoints/a.pt", "runs/1/artifacts/step-00000002/a.txt"


@pytest.fixture
def store(database: Database, running: Run) -> MemoryStore:
    """A store with checkpoint and artifact of an ended run, whose steps have NaN and infinity."""
    store, content = MemoryStore(), b"weights"
    file = {"kind": "checkpoint", "size_bytes": 7, "sha256": hashlib.sha256(content).hexdigest()}
    event = {"step": 2, "reason": "end", "files": [file]}
    sample = {"step": 2, "name": "a.txt", **file}
    steps = np.array(
        [
            (1, 5, 900, np.nan, 2.0**16, np.inf, np.inf, 1e-3, 3, 40),
            (2, 9, 900, 0.5, 2.0**15, 1, 1, 1, 0, -1),
        ],
        STEP_DTYPE,
    )
    for key in (CHECKPOINT, ARTIFACT):
        obstore.put(store, key, content)
    with database.writing() as session:
        telemetry.record(session, running.id, 1, telemetry.Flush(steps=[steps]))
        checkpoints.publish(session, running.id, 1, checkpoint_of(event), [CHECKPOINT])
        artifacts.publish(session, running.id, 1, artifact_of(sample), ARTIFACT)
        queue.end(session, running.id, 1, Status.FINISHED)
    return store


def test_a_database_that_cannot_be_written_is_not_backed_up(
    database: Database, store: MemoryStore, tmp_path: Path
) -> None:
    """A read-only standby is not backed up, because its servers would not know of the backup."""
    url = database.engine.url
    if url.get_backend_name() == "sqlite":
        read_only = url.set(database=f"file:{url.database}", query={"mode": "ro", "uri": "true"})
    else:
        read_only = url.update_query_dict({"options": "-c default_transaction_read_only=on"})
    standby = Database(read_only.render_as_string(hide_password=False))
    with pytest.raises(Conflict, match=r"cannot be written: .*read-?only.* back up the primary"):
        back_up(standby, store, tmp_path / "backup")
    standby.dispose()
    assert list(tmp_path.glob(".backup-*")) == []


def test_the_store_is_waited_for_in_no_transaction(
    database: Database, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transaction is open during requests to the store, since others would wait."""
    open_at_work: list[int] = []

    def watching(module: ModuleType, name: str) -> None:
        before = getattr(module, name)

        def work(*given: Any, **options: Any) -> Any:
            open_at_work.append(database.engine.pool.checkedout())  # type: ignore[attr-defined]
            return before(*given, **options)

        monkeypatch.setattr(module, name, work)

    watching(backup, "put_file")
    watching(storage, "delete_files")
    back_up(database, store, tmp_path / "backup")
    with database.writing() as session:
        for table in reversed(Table.metadata.sorted_tables):
            session.execute(table.delete())
    copy = MemoryStore()
    restore(database, copy, tmp_path / "backup")
    obstore.put(copy, f"{CHECKPOINT}.other", b"x")
    with database.reading() as session:
        wrong = mismatches(session, copy)
    mend(database, copy, wrong)
    assert (len(open_at_work) >= 3, set(open_at_work)) == (True, {0})


@pytest.mark.parametrize("other", ["sqlite", "same"])
def test_backup_restores_every_row_and_file(
    database: Database, store: MemoryStore, tmp_path: Path, sqlite_template: Path, other: str
) -> None:
    """A restore into an empty database of either kind gives the same rows and files."""
    before = contents(database)
    saved = back_up(database, store, tmp_path / "backup")
    target = database if other == "same" else Database(f"sqlite:///{tmp_path / 'other.db'}")
    if other == "same":
        with database.writing() as session:
            for table in reversed(Table.metadata.sorted_tables):
                session.execute(table.delete())
    else:
        target.migrate()
    copy = MemoryStore()
    restored = restore(target, copy, tmp_path / "backup")
    assert (restored["rows"], restored["files"]) == (saved["rows"], saved["files"])
    assert saved["left_out"] == []
    assert contents(target) == before
    for key in (CHECKPOINT, ARTIFACT):
        assert obstore.get(copy, key).bytes().to_bytes() == b"weights"
    with target.writing() as session:
        assert submit(session, accounts.user_named(session, "ada")).id == 2
    target.dispose()


def test_uploaded_weights_that_a_run_starts_from_are_restored(
    database: Database, running: Run, ada: User, tmp_path: Path
) -> None:
    """Of uploaded weights only those that a run uses and that are intact are restored."""
    store, sha256 = MemoryStore(), hashlib.sha256(b"weights").hexdigest()
    named, damaged = f"{sha256}/net.pt", f"{'0' * 64}/net.pt"
    for upload in (named, damaged, f"{sha256}/other.pt"):
        obstore.put(store, uploads.key(upload), b"weights")
    with database.writing() as session:
        first, second = runs.get(session, running.id), submit(session, ada)
        for run, upload in ((first, named), (second, damaged)):
            run.config = run.config | {"weights": {"upload": upload}}
            config_values.note(session, run)
    saved = back_up(database, store, tmp_path / "backup")
    assert (saved["files"], saved["left_out"]) == (1, [uploads.key(damaged)])
    target = Database(f"sqlite:///{tmp_path / 'other.db'}")
    target.migrate()
    copy = MemoryStore()
    restore(target, copy, tmp_path / "backup")
    assert [each["path"] for page in obstore.list(copy) for each in page] == [uploads.key(named)]
    target.dispose()


def test_a_damaged_file_is_left_out_of_a_backup_by_name(
    database: Database, store: MemoryStore, tmp_path: Path
) -> None:
    """A damaged file is named, and the backup has all other files."""
    obstore.put(store, CHECKPOINT, b"weightz")
    saved = back_up(database, store, tmp_path / "backup")
    assert (saved["files"], saved["left_out"]) == (1, [CHECKPOINT])
    target = Database(f"sqlite:///{tmp_path / 'other.db'}")
    target.migrate()
    restore(target, MemoryStore(), tmp_path / "backup")
    with target.reading() as session:
        assert checkpoints.of_run(session, 1) == []
        assert [row.key for row in artifacts.newest(session, 1, most=100)] == [ARTIFACT]
        assert runs.get(session, 1).status == Status.FINISHED
    target.dispose()


def test_backup_overwrites_nothing(database: Database, store: MemoryStore, tmp_path: Path) -> None:
    """A backup overwrites no folder, and a restore no database with runs."""
    back_up(database, store, tmp_path / "backup")
    with pytest.raises(Conflict, match="exists already"):
        back_up(database, store, tmp_path / "backup")
    with pytest.raises(Conflict, match="has runs already"):
        restore(database, store, tmp_path / "backup")
    with pytest.raises(Invalid, match="not a backup"):
        restore(database, store, tmp_path)


@pytest.mark.parametrize("key", [CHECKPOINT, ARTIFACT])
def test_storage_check_names_and_mends_what_does_not_match(
    database: Database, store: MemoryStore, key: str
) -> None:
    """A missing, truncated, altered or unknown file is named, and repaired by mending."""

    def found(*, deep: bool = False) -> list[str]:
        with database.reading() as session:
            return [mismatch.problem for mismatch in mismatches(session, store, deep=deep)]

    assert found(deep=True) == []
    obstore.put(store, f"{key}.other", b"x")
    obstore.put(store, key, b"weightz")
    assert found() == ["no row names the file"]
    assert found(deep=True)[0].startswith("the file is altered")
    obstore.put(store, key, b"weig")
    assert found()[0] == "the file has 4 bytes, not the recorded 7"
    obstore.delete(store, key)
    assert found()[0] == "the file is missing"
    with database.reading() as session:
        wrong = mismatches(session, store)
    mend(database, store, wrong)
    assert found(deep=True) == []
    with database.reading() as session:
        rows = [*checkpoints.of_run(session, 1), *artifacts.newest(session, 1, most=100)]
    assert {row.key for row in rows} == {CHECKPOINT, ARTIFACT} - {key}


def test_storage_check_passes_over_a_run_in_training(
    database: Database, store: MemoryStore, ada: User
) -> None:
    """A file that a running run's supervisor has not published yet is not reported."""
    with database.writing() as session:
        session.get_one(Run, submit(session, ada).id).status = Status.RUNNING
    obstore.put(store, "runs/2/checkpoints/new.pt", b"x")
    with database.reading() as session:
        assert runs.get(session, 2).status == Status.RUNNING
        assert mismatches(session, store) == []


def make_value(column: Column[Any], number: int) -> Any:
    """Return a value for a column of row 1 or 2, which refers to the same row of other tables."""
    if column.foreign_keys:
        return {int: number, str: f"name {number}"}[column.type.python_type]
    if column.name in ("created_at", "expires_at"):
        return 4e9 + number
    text = "\N{SNOWMAN} 1e999 \\ \n" if column.unique is None and not column.primary_key else "name"
    values = {
        bool: True,
        int: number,
        float: math.inf if column.nullable else number / 3,
        str: f"{text} {number}",
        bytes: bytes(range(256)) * number,
        object: {"list": [1, None, {"nested": "\N{SNOWMAN}"}], "number": number / 3},
    }
    return values[column.type.python_type]


def fill_every_table(database: Database, store: MemoryStore) -> None:
    """Write two rows into every table, with a value in every column, and the files they name."""
    content = b"content of every file"
    file = {"key": CHECKPOINT, "sha256": hashlib.sha256(content).hexdigest()}
    for key in (CHECKPOINT, *(f"reports/{number}/{file['sha256']}" for number in (1, 2))):
        obstore.put(store, key, content)
    with database.writing() as session:
        for table in Table.metadata.sorted_tables:
            session.execute(table.delete())
            for number in (1, 2):
                row = {column.name: make_value(column, number) for column in table.columns}
                if table is FrozenSteps.__table__:
                    row["size_bytes"] = len(content)
                session.execute(table.insert(), row | (file if "sha256" in row else {}))


@pytest.mark.sql
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_every_column_of_every_table_is_restored(
    database: Database, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """A restore preserves every column of every table."""
    store = MemoryStore()
    fill_every_table(database, store)
    before = contents(database)
    assert before.keys() == {table.name for table in Table.metadata.sorted_tables}
    with database.writing() as session:
        session.execute(delete(Backup))  # whose sequence does not know the rows
    saved = back_up(database, store, tmp_path / "backup")
    assert saved["left_out"] == []
    with empty_database(kind, tmp_path, request) as target:
        restore(target, MemoryStore(), tmp_path / "backup")
        after = contents(target)
    ended = {"sessions", "sign_in_links", "backups"}
    derived = {"step_buckets", "metric_buckets"}
    for name in before.keys() - ended - derived:
        assert after[name] == before[name], name
    assert not ended & after.keys()


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_backup_by_an_earlier_version_is_converted(
    database: Database, running: Run, tmp_path: Path, has_blocks: bool
) -> None:
    """A backup of an earlier version is restored with all of its points and steps."""
    points = [make_metric(step, step / 7) for step in range(300)]
    record(database, running, make_steps([1.0] * 300), events=points)
    if not has_blocks:
        as_rows(database, running)
    earlier_metrics.as_rows(database, running)
    back_up(database, MemoryStore(), tmp_path / "backup")
    missing = ("step_blocks", "loss_curves") if not has_blocks else ()
    for name in ("metric_blocks", "metric_tails", "step_conversions", *missing):
        (tmp_path / "backup" / "tables" / f"{name}.jsonl.gz").unlink()
    target = Database(f"sqlite:///{tmp_path / 'other.db'}")
    target.migrate()
    restore(target, MemoryStore(), tmp_path / "backup")
    step_conversion.convert(target, running.id)
    with target.reading() as session:
        assert len(step_rows.read_rows(session, running.id, most=1000)) == 300
        assert len(read_logged_points(session, running.id)) == 300
    target.dispose()


def test_summaries_are_the_same_after_a_restore(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Summaries, which no backup has, are recomputed to the same bytes after a restore."""
    for first in range(1, 18_000, 1800):
        events = [
            make_metric(step, step / 7, name)
            for step in range(first, first + 1800)
            for name in ("every", "often", "seldom")
            if step % {"every": 1, "often": 10, "seldom": 100}[name] == 0
        ]
        record(database, running, make_steps([1.0] * 1800, first=first), events=events)
    before = contents(database)
    back_up(database, MemoryStore(), tmp_path / "backup")
    target = Database(f"sqlite:///{tmp_path / 'other.db'}")
    target.migrate()
    restore(target, MemoryStore(), tmp_path / "backup")
    after = contents(target)
    target.dispose()
    for name in ("step_buckets", "metric_blocks", "latest_metrics"):
        assert before[name] == after[name] != []


def test_restored_sign_ins_end_and_valid_secrets_are_listed(
    database: Database, ada: User, tmp_path: Path
) -> None:
    """A restore ends sessions and links, and lists tokens that work again."""
    with database.writing() as session:
        cookie, _row = accounts.start_session(session, session.get_one(User, ada.id))
        link = accounts.make_link_token(session, ada)
        token, _ci = accounts.make_api_token(session, ada, "ci", days=None)
        _old, expired = accounts.make_api_token(session, ada, "old")
        session.flush()
        expired.expires_at = 1.0
        shared_links.make(session, ada, [submit(session, ada).id], days=1)
    back_up(database, MemoryStore(), tmp_path / "backup")
    for revoke in (False, True):
        target = Database(f"sqlite:///{tmp_path / f'{revoke}.db'}")
        target.migrate()
        restored = restore(target, MemoryStore(), tmp_path / "backup", revoke=revoke)
        with target.reading() as session:
            assert accounts.find_session(session, cookie) is None
            assert (accounts.find_api_token(session, token) is None) == revoke
        with target.writing() as session, pytest.raises(InvalidCredentials):
            accounts.redeem_link_token(session, link)
        names = [(row["user"], row["name"], row["kind"]) for row in restored["tokens"]]
        assert names == ([] if revoke else [("ada", "ci", "full")])
        assert len(restored["shared_links"]) == (0 if revoke else 1)
        target.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_deliveries_that_were_due_are_not_sent_after_a_restore(
    database: Database, ada: User, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Deliveries due at the backup may have been sent since, so a restore does not send them."""
    with database.writing() as session:
        channel = Channel(user_id=ada.id, name="c", kind="webhook", target="", ciphertext="")
        session.add(channel)
        session.flush()
        for ended_at in (None, 5.0, None):
            due = Delivery(user_id=ada.id, channel_id=channel.id, body="{}", ended_at=ended_at)
            session.add(due)
    back_up(database, MemoryStore(), tmp_path / "backup")
    with database.reading() as session:
        assert deliveries.is_any_due(session)
    with empty_database(kind, tmp_path, request) as target:
        assert restore(target, MemoryStore(), tmp_path / "backup")["unsent"] == 2
        check_unsent(target)


def check_unsent(target: Database) -> None:
    with target.reading() as session:
        assert not deliveries.is_any_due(session)
        rows = session.scalars(select(Delivery).order_by(Delivery.id)).all()
        assert [row.is_delivered for row in rows] == [False] * 3
        assert [row.answer[:8] for row in rows] == ["not sent", "", "not sent"]
        assert rows[1].ended_at == 5.0


def test_a_database_with_an_audit_log_is_not_restored_into(
    database: Database, ada: User, tmp_path: Path
) -> None:
    """A database with an audit log, which is permanent, is not restored into."""
    back_up(database, MemoryStore(), tmp_path / "backup")
    target, store = Database(f"sqlite:///{tmp_path / 'other.db'}"), MemoryStore()
    target.migrate()
    with target.writing() as session:
        audit.note_typed(session, "link", "operator")
    with pytest.raises(Conflict, match="audit log"):
        restore(target, store, tmp_path / "backup")
    target.dispose()


def test_a_failed_backup_leaves_nothing(
    database: Database, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed backup leaves no folder that could be taken for a backup."""
    monkeypatch.setitem(backup.CODECS, float, (str.upper, float))
    with pytest.raises(TypeError):
        back_up(database, store, tmp_path / "backup")
    assert not [path for path in tmp_path.iterdir() if "backup" in path.name]


def test_weights_that_are_not_set_name_no_upload(database: Database, ada: User) -> None:
    """A configuration with `weights.upload: null` names no file."""
    with database.writing() as session:
        run = submit(session, ada)
        run.config = run.config | {"weights": {"upload": None}}
        config_values.note(session, run)
    with database.reading() as session:
        assert uploads.named(session) == set()


def test_a_key_that_leads_out_of_the_backup_is_left_out(
    database: Database, store: MemoryStore, tmp_path: Path
) -> None:
    """A manipulated key that leads out of the backup is reported and skipped."""
    key = "../../outside.pt"
    with database.writing() as session:
        session.scalars(select(CheckpointFile)).one().key = key
    result = back_up(database, store, tmp_path / "deep" / "backup")
    assert result["left_out"] == [key]
    assert not list(tmp_path.rglob("outside.pt"))


def test_viewers_are_notified_of_repairs(
    database: Database, store: MemoryStore, running: Run
) -> None:
    """Open pages of repaired runs and artifacts are updated."""
    with database.reading() as session:
        seen = history.cursor_now(session, runs.get(session, running.id))
    for key in (CHECKPOINT, ARTIFACT):
        obstore.delete(store, key)
    with database.reading() as session:
        wrong = mismatches(session, store)
    mend(database, store, wrong)
    with database.reading() as session:
        result = series.changes(session, running.id, seen)
    assert result is not None
    assert result.has_new_files
