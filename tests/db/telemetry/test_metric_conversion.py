"""Metrics of earlier versions are converted to bit-equal blocks, wherever a conversion stops."""

import math
import signal
from threading import Event
from typing import Any

import pytest
from alembic import command
from sqlalchemy import func, select, update

from db.database import Database
from db.errors import StepsMissing, StepsNotConverted
from db.queue import queue
from db.sweeps import sweeps
from db.tables import Metric, MetricBlock, MetricBucket, MetricTail, Run, Status, StepConversion
from db.telemetry import (
    metric_block_writer,
    metric_blocks,
    metric_conversion,
    series,
    step_conversion,
    telemetry,
    windows,
)
from halfstep.telemetry import events
from tests.db.telemetry import earlier_steps
from tests.db.telemetry.dying_database import dying_database
from tests.db.telemetry.earlier_metrics import as_rows
from tests.db.telemetry.telemetry_made import make_metric, make_steps, read_logged_points, record
from tests.forkserver import FORKSERVER, IN_ONE_PROCESS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in many transactions and into many blocks."""
    _make_small(monkeypatch.setattr)


def _make_small(change: Any) -> None:
    change(metric_conversion, "BATCH_POINTS", 150)
    change(metric_block_writer, "BLOCK_POINTS", 256)
    change(metric_block_writer, "LEAST_POINTS", 2000)


@pytest.fixture
def recorded(database: Database, running: Run) -> dict[str, Any]:
    """What readers return of a run with dense and sparse metrics, and odd values."""
    points = [("dense", step, math.sin(step)) for step in range(3000)]
    points += [("sparse", 80 * step, float(step)) for step in range(40)]
    points += [(f"n{number}", 7, 0.1) for number in range(30)]
    odd = [math.nan, math.inf, -math.inf, 1e-300, 0.5]
    points += [("odd", step, value) for step, value in enumerate(odd)]
    record(database, running, events=[make_metric(step, value, n) for n, step, value in points])
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    return everything(database, running)


def everything(database: Database, run: Run) -> dict[str, Any]:
    with database.reading() as session:
        zooms = ((None, None), (50, 2000), (2900, None))
        return {
            "points": repr(read_logged_points(session, run.id)),
            "lines": [
                repr(
                    windows.metrics_of_runs(session, [run.id], first=first, last=last, most=most)[
                        run.id
                    ]
                )
                for first, last in zooms
                for most in (100, 5000)
            ],
            "measured": windows.measure(session, run.id),
            "total": series.metrics(session, run.id, limit=1).total,
        }


def is_waiting(database: Database, run: Run) -> bool:
    with database.reading() as session:
        conversion = session.get(StepConversion, run.id)
        return conversion is not None and conversion.metrics_wait


@pytest.mark.sql
def test_a_converted_run_is_as_if_recorded_by_this_version(
    database: Database, running: Run, recorded: dict[str, Any]
) -> None:
    """A converted run reads as if recorded by this version; until then nothing is read."""
    as_rows(database, running)
    with database.reading() as session:
        for read in (
            lambda: windows.metrics_of_runs(session, [running.id]),
            lambda: windows.measure(session, running.id),
            lambda: read_logged_points(session, running.id),
        ):
            with pytest.raises(StepsNotConverted, match="converted after"):
                read()
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded
    with database.reading() as session:
        for table in (Metric, MetricBucket, StepConversion):
            assert session.scalar(select(func.count()).select_from(table)) == 0
        assert session.scalar(select(func.count()).select_from(MetricBlock)) > 10
    step_conversion.convert(database, running.id)  # again: nothing is left to do
    assert everything(database, running) == recorded


def test_a_short_run_becomes_one_row(database: Database, running: Run) -> None:
    """A short run is converted to one row, as one that ended in this version."""
    record(database, running, events=[make_metric(1, 0.5, f"m{n}") for n in range(50)])
    as_rows(database, running)
    step_conversion.convert(database, running.id)
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(MetricTail)) == 1
        assert len(read_logged_points(session)) == 50


class _StopsLate(Event):
    """An event that is set after some pauses."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self._pauses = pauses

    def wait(self, timeout: float | None = None) -> bool:
        self._pauses -= 1
        return self._pauses < 0


def test_a_stopped_conversion_continues(
    database: Database, running: Run, recorded: dict[str, Any]
) -> None:
    """A stopped conversion continues; metrics are unreadable until all were compared."""
    as_rows(database, running)
    for pauses in range(100):
        try:
            step_conversion.convert(database, running.id, stopping=_StopsLate(pauses))
            break
        except step_conversion.Stopped:
            if not is_waiting(database, running):
                assert everything(database, running) == recorded
    assert everything(database, running) == recorded
    assert pauses > 3


def _convert_until(url: str, run_id: int, point: int) -> None:
    """Convert a run in a process that is killed at a statement."""
    _make_small(setattr)
    step_conversion.convert(dying_database(url, point), run_id)


@IN_ONE_PROCESS
@pytest.mark.slow
def test_a_kill_at_any_statement_loses_nothing(
    database: Database, database_url: str, running: Run, recorded: dict[str, Any]
) -> None:
    """After a kill at any statement the next conversion continues."""
    as_rows(database, running)
    database.dispose()
    for point in (1, 3, 6, 9, 12, 14, 17):
        child = FORKSERVER.Process(target=_convert_until, args=(database_url, running.id, point))
        child.start()
        child.join()
        with database.reading() as session:
            is_left = running.id in step_conversion.due(session)
        assert child.exitcode == -signal.SIGKILL or not is_left
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded


def test_blocks_that_differ_are_not_read(
    database: Database, running: Run, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If blocks differ from the rows, the rows stay, and the next conversion begins again."""
    as_rows(database, running)
    append = metric_block_writer.append_converted

    def change(*given: Any) -> None:
        *others, points = given
        points.points.values[0] += 1
        append(*others, points)

    with monkeypatch.context() as patch:
        patch.setattr(metric_block_writer, "append_converted", change)
        with pytest.raises(StepsMissing, match="differ"):
            step_conversion.convert(database, running.id)
    assert is_waiting(database, running)
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded


def test_recording_converts_its_run_first(database: Database, running: Run) -> None:
    """Recording metrics or steps first converts a run; other data need no conversion."""
    record(database, running, make_steps([1.0] * 9), events=[make_metric(3, 0.5)])
    earlier_steps.as_rows(database, running)
    as_rows(database, running)
    point = events.Metric(name="val/accuracy", step=4, elapsed_ms=1, value=0.75)
    flush = telemetry.Flush(events=[point])
    step_conversion.write(
        database, lambda session: telemetry.record(session, running.id, running.attempt, flush)
    )
    with database.reading() as session:
        assert [each.value for each in read_logged_points(session)] == [0.5, 0.75]
        assert step_conversion.due(session) == []


def test_a_run_that_an_earlier_version_records_waits(database: Database, running: Run) -> None:
    """A run that an earlier version records is converted once its attempt has ended."""
    record(database, running, events=[make_metric(3, 0.5)])
    as_rows(database, running)
    with database.writing() as session:
        session.execute(update(StepConversion).values(attempt=running.attempt))
    step_conversion.convert(database, running.id)
    assert is_waiting(database, running)
    with database.writing() as session:
        status = Run.id == running.id
        session.execute(update(Run).where(status).values(status=Status.FINISHED))
    step_conversion.convert(database, running.id)
    with database.reading() as session:
        assert [point.value for point in read_logged_points(session)] == [0.5]


def test_a_sweep_waits_for_the_conversion(database: Database, running: Run) -> None:
    """A sweep waits for the conversion of its runs without an error."""
    record(database, running, make_steps([1.0] * 9), events=[make_metric(3, 0.5)])
    names = ("val/accuracy", "loss")
    with database.reading() as session:
        assert [sweeps.value_from(session, name, running.id, 2) for name in names] == [0.5, 1.0]
    earlier_steps.as_rows(database, running)
    as_rows(database, running)
    with database.reading() as session:
        run = session.get_one(Run, running.id)
        for name in names:
            assert sweeps.value_from(session, name, running.id, 2) is None
            assert sweeps.value_at(session, name, run, 1) is None


@pytest.mark.sql
def test_a_downgrade_writes_the_rows_again(
    database: Database, running: Run, recorded: dict[str, Any]
) -> None:
    """A downgrade writes the rows again, and the next upgrade converts them."""
    command.downgrade(database.migrations(), "0055")
    command.upgrade(database.migrations(), "head")
    assert is_waiting(database, running)
    step_conversion.convert(database, running.id)
    assert everything(database, running) == recorded
    with database.reading() as session:
        assert metric_blocks.count(session.connection(), running.id) == 3075
