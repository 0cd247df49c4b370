"""Blocks of steps return what a plain list would, whatever is recorded, repeated or rolled back."""

import math
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sqlalchemy import select, update

from db.database import Database
from db.queue import queue
from db.tables import Run, Step, StepBlock, StepBucket, User, Worker
from db.telemetry import (
    block_codec,
    series,
    step_block_writer,
    step_blocks,
    step_rows,
    telemetry,
    windows,
)
from db.telemetry.pyramid import END, SIZES, STEP_SERIES, sum_up
from db.telemetry.step_blocks import RANGE, StepSource
from db.telemetry.step_rows import StepRow
from db.telemetry.summaries import unpack
from halfstep.telemetry.flags import SKIPPED, UNKNOWN_LOSS
from tests.db.conftest import claim, submit
from tests.db.telemetry.dying_database import dying_database
from tests.db.telemetry.telemetry_made import forget, make_steps, record
from tests.forkserver import FORKSERVER, IN_ONE_PROCESS

#: A function-scoped database may serve every example: each begins with a run of its own.
anyhow = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
floats = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0])


@st.composite
def batches(draw: st.DrawFn, first: int) -> NDArray[Any]:
    """Draw steps from `first` on, close together or far apart, with a few odd values."""
    number = draw(st.sampled_from([1, 2, 10, 200, 300, 3000, 5000]))
    stride = draw(st.sampled_from([1, 1, 1, 2, 64, 900]))
    steps = make_steps(np.linspace(1, 2, number).tolist())
    steps["step"] = first + stride * np.arange(number)
    for name in ("loss", "scale", "grad_norm", "grad_norm_clipped", "lr"):
        for at in draw(st.lists(st.integers(0, number - 1), max_size=3)):
            steps[name][at] = draw(floats)
    for at in draw(st.lists(st.integers(0, number - 1), max_size=3)):
        steps["flags"][at] = draw(st.sampled_from([SKIPPED, UNKNOWN_LOSS, 8, 32, 1 << 8]))
        steps["data_us"][at] = -1
    return steps


@pytest.fixture
def other(database: Database, ada: User, running: Run, worker: Worker) -> Run:
    """Another run in its first attempt."""
    with database.writing() as session:
        submit(session, ada)
        run = claim(session, worker)
        assert run is not None
        queue.start(session, run.id, run.attempt)
        return run


#: How far a batch or a rollback goes back from the last step.
back = st.sampled_from([0, 1, 7, 300, 2000, 5000, 20_000])


def plain(batch: NDArray[Any]) -> dict[int, Any]:
    """Return what is stored of steps, as (floats, others) by step."""
    batch = telemetry._canonical(batch)
    columns = block_codec.of_records(batch)
    columns = columns | {"grad_norm_clipped": step_blocks.get_applied_norm(columns)}
    lists = [block_codec.to_list(name, columns[name]) for name in StepRow._fields]
    return {row[0]: StepRow(*row) for row in zip(*lists, strict=True)}


@pytest.mark.sql
@pytest.mark.slow
@given(data=st.data())
@anyhow
def test_blocks_have_what_a_list_would_have(
    database: Database, running: Run, data: st.DataObject
) -> None:
    """After any batches, repetitions and rollbacks blocks equal a plain list, also flagged rows."""
    forget(database, running)
    expected: dict[int, StepRow] = {}
    latest: NDArray[Any] | None = None
    for _ in range(data.draw(st.integers(1, 6))):
        last = max(expected, default=0)
        kind = data.draw(st.sampled_from(["next", "next", "next", "other", "again", "rollback"]))
        if kind == "rollback":
            after = max(0, last - data.draw(back))
            with database.writing() as session:
                telemetry.truncate(session, running.id, running.attempt, after=after)
            expected = {step: row for step, row in expected.items() if step <= after}
            continue
        if kind != "again" or latest is None:
            gap = data.draw(st.sampled_from([1, 1, 1, 70, 9000]))
            before = data.draw(back) if kind == "other" else -gap
            latest = data.draw(batches(max(1, last - before)))
        record(database, running, latest)
        expected |= plain(latest)
    rows = [expected[step] for step in sorted(expected)]
    with database.reading() as session:
        assert repr(step_rows.read_rows(session, running.id, most=END)) == repr(rows)
        flagged = select(Step.step, Step.flags).where(Step.run_id == running.id)
        assert [tuple(row) for row in session.execute(flagged.order_by(Step.step))] == [
            (row.step, row.flags) for row in rows if row.flags & step_blocks.FLAGS
        ]
        assert series.newest_rows(session, running.id).step == max(expected, default=0)
        some = rows[:: max(1, len(rows) // 7)]
        at = [row.step for row in some]
        assert repr(step_rows.rows_at(session, running.id, [*at, 10**9])) == repr(some)
    _check_blocks(database, running, expected)


def _check_blocks(database: Database, run: Run, expected: dict[int, StepRow]) -> None:
    """Check that blocks do not overlap, and that all summaries match the steps."""
    everything = [(size, -END // size, END // size) for size in SIZES]
    with database.reading() as session:
        connection = session.connection()
        table = StepBlock.__table__.c
        query = select(table.first, table.last, table.steps, table.is_sealed)
        rows = session.execute(query.where(table.run_id == run.id).order_by(table.first)).all()
        columns = step_blocks.read_columns(connection, run.id, (-END, END))
        found = StepSource.of(run.id).read_buckets(connection, everything)
        unread = session.scalar(select(StepBucket.size).where(StepBucket.size == SIZES[0]))
    assert unread is None
    assert sum(row.steps for row in rows) == len(expected)
    for row, following in pairwise(rows):
        assert row.last < following.first
        assert row.is_sealed or not following.is_sealed
        if row.is_sealed:
            assert row.last // RANGE < following.first // RANGE
    none = unpack(np.empty(0, np.int64), [], STEP_SERIES, SIZES[0])
    points = step_blocks.points_of(columns, STEP_SERIES)
    start, size, packed = sum_up(points, dict.fromkeys(SIZES, none), STEP_SERIES)
    for each in SIZES if expected else ():
        whole = [row for row, its in zip(packed, size, strict=True) if its == each]
        summaries = unpack(start[size == each], whole, STEP_SERIES, each)
        assert repr(found[each]) == repr(summaries)
        np.testing.assert_array_equal(found[each].mean, summaries.mean)
        np.testing.assert_array_equal(found[each].low_step, summaries.low_step)


def test_a_repeated_flush_writes_nothing(database: Database, running: Run) -> None:
    """A repeated flush leaves the blocks unchanged."""
    steps = make_steps(np.linspace(3, 1, 9000).tolist(), skipped=[5, 4000])
    record(database, running, *np.split(steps, [10, 700, 5000]))
    before = _blocks(database)
    assert [row.is_sealed for row in before] == [True, True, False]
    record(database, running, steps[:5], steps[4000:4500], steps[8000:])
    assert _blocks(database) == before


def test_the_same_steps_give_the_same_sealed_blocks(database: Database, running: Run) -> None:
    """The same steps make the same sealed blocks, in any flushes and after rollbacks."""
    steps = make_steps(np.linspace(3, 1, 14_000).tolist(), skipped=[5, 4000])
    record(database, running, steps)
    sealed = [row for row in _blocks(database) if row.is_sealed]
    assert [(row.first, row.last) for row in sealed] == [(1, 4095), (4096, 8191), (8192, 12_287)]
    with database.writing() as session:
        telemetry.truncate(session, running.id, running.attempt, after=6000)
    assert [row.is_sealed for row in _blocks(database)] == [True, False]
    record(database, running, *np.split(steps[6000:], range(50, 8000, 400)))
    assert [row for row in _blocks(database) if row.is_sealed] == sealed


@pytest.mark.parametrize(("steps_of_flush", "stride"), [(10, 1), (1, 1), (1, 1000)])
def test_the_tail_is_joined_while_it_grows(
    database: Database, running: Run, steps_of_flush: int, stride: int
) -> None:
    """The tail is joined as it grows, so that a chart does not read thousands of parts."""
    number = max(700, 300 * steps_of_flush) if stride == 1 else 100
    steps = make_steps([1.0] * number)
    steps["step"] *= stride
    flushes = np.split(steps, range(steps_of_flush, number, steps_of_flush))
    with database.writing() as session:
        for flush in flushes:
            step_block_writer.write(session.connection(), running.id, flush)
    assert len([row for row in _blocks(database) if not row.is_sealed]) < 250
    assert stride == 1 or len(_blocks(database)) < 50
    with database.writing() as session:
        step_block_writer.join_tail(session.connection(), running.id)
    assert len([row for row in _blocks(database) if not row.is_sealed]) == 1
    with database.reading() as session:
        assert len(step_rows.read_rows(session, running.id, most=END)) == number


def test_a_damaged_block_costs_its_steps_only(database: Database, running: Run) -> None:
    """A damaged block loses its own steps only, a window names them, and recording continues."""
    steps = make_steps([1.0] * 13_000)
    record(database, running, steps)
    with database.writing() as session:
        its = (StepBlock.first == 4096, StepBlock.run_id == running.id)
        [data] = session.scalars(select(StepBlock.data).where(*its))
        damaged = data[:999] + bytes([data[999] ^ 1]) + data[1000:]
        session.execute(update(StepBlock).where(*its).values(data=damaged))
    with database.reading() as session:
        rows = step_rows.read_rows(session, running.id, most=END)
        assert [row.step for row in rows] == [*range(1, 4096), *range(8192, 13_001)]
        for span in ((4000, 5000), (5000, 6000), (5000, 9000), (4100, 12_000)):
            window = windows.windows_of(session, [running.id], first=span[0], last=span[1]).get(
                running.id
            )
            assert window is not None
            assert window.damaged == [(4096, 8191)]
        whole = windows.windows_of(session, [running.id]).get(running.id)
        assert whole is not None
        assert (whole.total, whole.damaged) == (13_000, [])  # from summaries
    record(database, running, make_steps([1.0] * 10, first=13_001))
    with database.reading() as session:
        assert len(step_rows.read_rows(session, running.id, most=END)) == 13_010 - 4096


def test_two_runs_do_not_mix(database: Database, running: Run, other: Run) -> None:
    """Windows of several runs equal those of each run."""
    record(database, running, make_steps([1.0] * 5000))
    record(database, other, make_steps([2.0] * 70, first=4000))
    both = [running.id, other.id]
    with database.reading() as session:
        for span in ((None, None), (4010, 4020), (4060, 6000), (1, 4000), (8000, 9000)):
            limits = {"first": span[0], "last": span[1]}
            together = windows.windows_of(session, both, **limits)
            each = {run: windows.windows_of(session, [run], **limits).get(run) for run in both}
            assert repr(together) == repr({run: one for run, one in each.items() if one})


def _record_until(url: str, run_id: int, first: int, point: int) -> None:
    """Record flushes in a process that is killed at a statement."""
    database = dying_database(url, point)
    for at in range(first, 10_000, 700):
        flush = telemetry.Flush(steps=[make_steps([1.0] * 700, first=at, skipped=[at])])
        with database.writing() as session:
            telemetry.record(session, run_id, 1, flush)


@IN_ONE_PROCESS
@pytest.mark.sql
@pytest.mark.slow
def test_a_kill_at_any_statement_leaves_whole_flushes(
    database: Database, database_url: str, running: Run
) -> None:
    """After a kill between chunk, seal and summaries a flush is stored whole or not at all."""
    first = 1
    for point in (1, 2, 4, 9, 14, 18, 21, 25, 33):
        database.dispose()
        arguments = (database_url, running.id, first, point)
        child = FORKSERVER.Process(target=_record_until, args=arguments)
        child.start()
        child.join()
        with database.reading() as session:
            rows = step_rows.read_rows(session, running.id, most=END)
            run = session.get_one(Run, running.id)
        assert len(rows) % 700 == 0
        assert (run.step, run.skipped) == (len(rows), len(rows) // 700)
        _check_blocks(database, running, {row.step: row for row in rows})
        first = len(rows) + 1
    assert first > 5000


@pytest.mark.sql
@pytest.mark.slow
def test_charts_are_whole_while_steps_are_recorded(
    database: Database, running: Run, other: Run
) -> None:
    """While two runs are recorded and sealed, a reader always sees a prefix of each."""
    failed: list[BaseException] = []

    def record_all(run: Run) -> None:
        try:
            for first in range(1, 5_000, 250):
                record(database, run, make_steps([float(run.id)] * 250, first=first))
        except BaseException as error:
            failed.append(error)

    writers = [Thread(target=record_all, args=(run,)) for run in (running, other)]
    for writer in writers:
        writer.start()
    seen = {running.id: 0, other.id: 0}
    while any(writer.is_alive() for writer in writers):
        with database.reading() as session:
            found = windows.windows_of(session, list(seen), most=500)
            connection = session.connection()
            whole = {run: step_blocks.read_columns(connection, run, (-END, END)) for run in seen}
        for run_id, window in found.items():
            assert window.total == window.last >= seen[run_id]
            assert window.series["loss"].y == [float(run_id)] * len(window.series["loss"].y)
            np.testing.assert_array_equal(whole[run_id]["step"], np.arange(1, window.last + 1))
            seen[run_id] = window.last
    for writer in writers:
        writer.join()
    assert failed == []
    with database.reading() as session:
        found = windows.windows_of(session, list(seen))
    assert {run_id: window.total for run_id, window in found.items()} == dict.fromkeys(seen, 5_000)


def _blocks(database: Database) -> list[Any]:
    with database.reading() as session:
        return list(session.execute(select(StepBlock.__table__).order_by(StepBlock.first)))
