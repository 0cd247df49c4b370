"""Steps of earlier versions are converted to bit-equal blocks, wherever a conversion stops."""

import math
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import obstore
import pytest
from alembic import command
from obstore.store import LocalStore, MemoryStore, ObjectStore
from sqlalchemy import func, select, update

from db import clock
from db.database import Database
from db.errors import StepsNotConverted, StepsUnreadable, StorageUnreachable
from db.health import input_bound
from db.queue import queue
from db.tables import (
    Backup,
    FrozenSteps,
    Run,
    RunNode,
    Status,
    Step,
    StepBlock,
    StepBucket,
    StepConversion,
)
from db.telemetry import (
    block_codec,
    bulk_writes,
    damage_search,
    loss_curves,
    series,
    step_blocks,
    step_conversion,
    telemetry,
    windows,
)
from db.telemetry.pyramid import END
from halfstep.telemetry.flags import UNKNOWN_LOSS, UNKNOWN_NORM
from tests.db.telemetry.dying_database import dying_database
from tests.db.telemetry.earlier_steps import as_file, as_rows, rows_left
from tests.db.telemetry.telemetry_made import make_events, make_steps, record
from tests.forkserver import FORKSERVER, IN_ONE_PROCESS
from tests.marks import extended

SKIPPED = (70, 3000, 4701)
Form = Callable[[Database, ObjectStore, Run], object]


def rows_only(database: Database, _store: ObjectStore, run: Run) -> None:
    as_rows(database, run)


FORMS: list[Any] = [pytest.param(rows_only, id="rows"), pytest.param(as_file, id="file")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in many transactions."""
    monkeypatch.setattr(step_conversion, "BATCH_STEPS", 500)


@pytest.fixture
def store(database: Database) -> ObjectStore:
    """The store of the database's files of steps."""
    store = MemoryStore()
    database.open_store = lambda: store
    return store


@pytest.fixture
def recorded(database: Database, running: Run) -> dict[str, Any]:
    """What readers return of a run with odd values."""
    steps = make_steps(np.linspace(3, 1, 5000).tolist(), skipped=SKIPPED)
    steps["loss"][[80, 4999]] = math.nan, math.inf
    steps["loss"][[90, 91]], steps["flags"][[90, 91]] = math.nan, UNKNOWN_LOSS
    steps["grad_norm"][100], steps["flags"][100] = math.nan, UNKNOWN_NORM
    steps["data_us"][200:300] = -1
    record(database, running, *np.split(steps, [10, 2500, 4990]), events=make_events(SKIPPED))
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    return everything(database, running)


def everything(database: Database, run: Run) -> dict[str, Any]:
    with database.reading() as session:
        row = session.get_one(Run, run.id)
        connection = session.connection()
        zooms = ((None, None), (50, 200), (1000, 4500), (4900, None))
        table = StepBlock.__table__
        blocks = select(table).where(table.c.run_id == run.id).order_by(table.c.first)
        buckets = StepBucket.__table__
        summaries = select(buckets).order_by(*buckets.primary_key)
        return {
            "raw": repr(series.raw_steps(session, run.id, most=END)),
            "windows": [
                repr(
                    windows.windows_of(session, [run.id], first=first, last=last, most=most).get(
                        run.id
                    )
                )
                for first, last in zooms
                for most in (100, 5000)
            ],
            "waits": input_bound.data_waits(session, [run.id]),
            "curve": loss_curves.read(connection, [run.id])[run.id].tobytes(),
            "row": (row.last_elapsed_ms, row.lost_since, row.skipped, row.step),
            "sealed": [each for each in session.execute(blocks).all() if each.is_sealed],
            "summaries": session.execute(summaries).all(),
        }


@pytest.mark.sql
@pytest.mark.parametrize("form", FORMS)
def test_a_converted_run_is_as_if_recorded_by_this_version(
    database: Database, running: Run, store: ObjectStore, recorded: dict[str, Any], form: Form
) -> None:
    """A converted run reads as if recorded by this version; only flagged rows remain."""
    form(database, store, running)
    with database.reading() as session, pytest.raises(StepsNotConverted, match="converted after"):
        windows.windows_of(session, [running.id]).get(running.id)
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded
    assert rows_left(database, running) == [70, 81, 3000, 4701, 5000]
    assert list(obstore.list(store)) == [[]] or not next(iter(obstore.list(store)), None)
    with database.reading() as session:
        for table in (StepConversion, FrozenSteps):
            assert session.scalar(select(func.count()).select_from(table)) == 0
    step_conversion.convert(database, running.id)  # again: nothing is left to do


def test_values_that_need_eight_bytes_stay(database: Database, running: Run) -> None:
    """A loss of an earlier version that is no float32 keeps eight bytes."""
    record(database, running, make_steps([1.0] * 50))
    as_rows(database, running)
    odd = {3: 0.1, 4: 1e300, 5: 5e-324, 6: -math.inf, 7: None}
    with database.writing() as session:
        for step, loss in odd.items():
            session.get_one(Step, (running.id, step)).loss = loss
        session.get_one(Step, (running.id, 8)).lr = None
    step_conversion.convert(database, running.id)
    with database.reading() as session:
        columns = step_blocks.read_columns(session.connection(), running.id, (3, 8))
    assert block_codec.to_list("loss", columns["loss"])[:5] == list(odd.values())
    assert block_codec.to_list("lr", columns["lr"])[5] is None


class _StopsLate(Event):
    """An event that is set after some pauses."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self._pauses = pauses

    def wait(self, timeout: float | None = None) -> bool:
        self._pauses -= 1
        return self._pauses < 0


@pytest.mark.parametrize("form", [rows_only, *extended([as_file])])
def test_a_stopped_conversion_continues(
    database: Database, running: Run, store: ObjectStore, recorded: dict[str, Any], form: Form
) -> None:
    """A stopped conversion continues; steps are unreadable until all were compared."""
    form(database, store, running)
    for pauses in range(1, 100):
        try:
            step_conversion.convert(database, running.id, stopping=_StopsLate(pauses))
            break
        except step_conversion.Stopped:
            with database.reading() as session:
                waits = running.id in step_conversion.unread(session)
            if not waits:
                assert everything(database, running) == recorded
    assert everything(database, running) == recorded
    assert pauses > 3


def _convert_until(url: str, run_id: int, point: int) -> None:
    """Convert a run in a process that is killed at a statement."""
    step_conversion.BATCH_STEPS = 500
    step_conversion.convert(dying_database(url, point), run_id)


@IN_ONE_PROCESS
@pytest.mark.sql
@pytest.mark.slow
def test_a_kill_at_any_statement_loses_nothing(
    database: Database, database_url: str, running: Run, recorded: dict[str, Any]
) -> None:
    """After a kill at any statement the next conversion continues."""
    as_rows(database, running)
    database.dispose()
    for point in (1, 3, 6, 11, 17, 24, 30, 34, 40, 43):
        child = FORKSERVER.Process(target=_convert_until, args=(database_url, running.id, point))
        child.start()
        child.join()
        with database.reading() as session:
            is_left = running.id in step_conversion.due(session)
        assert child.exitcode == -signal.SIGKILL or not is_left
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded


@pytest.mark.parametrize("form", FORMS)
def test_an_attempt_that_continues_converts_its_run(
    database: Database, running: Run, store: ObjectStore, form: Form
) -> None:
    """An attempt that continues a run converts it before its first flush."""
    record(database, running, make_steps([1.0] * 3000))
    form(database, store, running)
    flush = telemetry.Flush(steps=[make_steps([2.0] * 10, first=2001)])

    def change(session: Any) -> None:
        telemetry.truncate(session, running.id, running.attempt, after=2000)
        telemetry.record(session, running.id, running.attempt, flush)

    step_conversion.write(database, change)
    with database.reading() as session:
        raw = series.raw_steps(session, running.id, most=END)
    assert raw["step"] == list(range(1, 2011))
    assert raw["loss"] == [1.0] * 2000 + [2.0] * 10


@pytest.mark.sql
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_an_earlier_version_records_waits(
    database: Database, running: Run, is_killed: bool
) -> None:
    """A run that an earlier version records is converted once its attempt or lease has ended."""
    record(database, running, make_steps([1.0] * 3000))
    command.downgrade(database.migrations(), "0052")
    command.upgrade(database.migrations(), "head")
    step_conversion.convert(database, running.id)
    with database.writing() as session:
        assert step_conversion.due(session) == []
        assert step_conversion.unread(session) == [running.id]
        steps = make_steps([2.0] * 10, first=3001)
        columns = {name: steps[name].astype(float) for name in block_codec.NAMES}
        columns["flags"] = columns["step_us"] = steps["step"] * 0
        key = {"run_id": running.id}
        bulk_writes.replace(session.connection(), Step.__table__, key, {**columns})
        if is_killed:  # and no worker has taken the run since
            session.execute(update(RunNode).values(lease_expires_at=clock.now() - 1))
        else:
            queue.end(session, running.id, running.attempt, Status.PAUSED)
    step_conversion.convert(database, running.id)
    with database.reading() as session:
        raw = series.raw_steps(session, running.id, most=END)
    assert raw["loss"] == [1.0] * 3000 + [2.0] * 10


@pytest.mark.parametrize("problem", ["missing", "damaged"])
def test_a_lost_file_stops_the_conversion_but_no_recording(
    database: Database, running: Run, store: ObjectStore, problem: str
) -> None:
    """Steps in a lost file stay lost, but larger summaries draw them, and recording continues."""
    record(database, running, make_steps([1.0] * 9500))
    key = as_file(database, store, running)
    obstore.put(store, "steps/0/of-another-run.parquet", b"")
    if problem == "missing":
        obstore.delete(store, key)
    else:
        obstore.put(store, key, b"PAR1" * 1000)
    with pytest.raises(StepsUnreadable, match=key):
        step_conversion.convert(database, running.id)
    flush = telemetry.Flush(steps=[make_steps([2.0] * 10, first=9501)])

    def change(session: Any) -> None:
        telemetry.record(session, running.id, running.attempt, flush)

    step_conversion.write(database, change)
    with database.reading() as session:
        raw = series.raw_steps(session, running.id, most=END)
        assert raw["step"] == [1, *range(9401, 9511)]
        whole = windows.windows_of(session, [running.id], most=100).get(running.id)
        assert whole is not None
        assert whole.total > 8000
        [lost] = damage_search.find_in_run(session.connection(), running.id)
    assert (lost.kind, lost.first, lost.last // 512) == ("lost", 1, 9400 // 512)


def test_a_store_that_does_not_answer_is_an_outage(
    database: Database, running: Run, store: ObjectStore
) -> None:
    """A store that does not answer is an outage, after which recorders try again."""
    record(database, running, make_steps([1.0] * 3000))
    key = as_file(database, store, running)
    obstore.delete(store, key)  # and it has no other file: it is not mounted
    with pytest.raises(StorageUnreachable):
        step_conversion.convert(database, running.id, lost=True)
    with database.reading() as session:
        assert step_conversion.unread(session) == [running.id]


def test_a_backup_keeps_the_file(database: Database, running: Run, tmp_path: Path) -> None:
    """A backup that may have read a run's row keeps the file after its conversion."""
    store = LocalStore(tmp_path)
    database.open_store = lambda: store
    record(database, running, make_steps([1.0] * 3000))
    key = as_file(database, store, running)
    with database.writing() as session:
        session.add(Backup(folder="f"))
    step_conversion.convert(database, running.id)
    assert (tmp_path / key).exists()


def test_blocks_that_differ_are_not_read(
    database: Database, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If blocks differ from the rows, the rows stay, and a later conversion begins again."""
    record(database, running, make_steps([1.0] * 3000))
    as_rows(database, running)
    encode = block_codec.encode

    def wrong(columns: Any) -> bytes:
        return encode(columns | {"loss": columns["loss"] + 1})

    with monkeypatch.context() as patched:
        patched.setattr(block_codec, "encode", wrong)
        with pytest.raises(Exception, match="differ from its steps"):
            step_conversion.convert(database, running.id)
    assert rows_left(database, running) == list(range(1, 3001))
    step_conversion.convert(database, running.id)
    with database.reading() as session:
        assert series.raw_steps(session, running.id, most=END)["loss"] == [1.0] * 3000
