"""The pyramid of summaries agrees with the raw steps, in any order of arrival."""

from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.database import Database
from db.tables import Run, StepBucket
from db.telemetry import pyramid, step_block_writer, windows
from db.telemetry.step_blocks import StepSource
from db.telemetry.summaries import Points, Summaries, layout, merge, unpack
from halfstep.telemetry.spool import UNKNOWN_US
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def test_run_counts_each_skip_once(database: Database, running: Run) -> None:
    """A skip of repeated steps counts once, and a repetition may remove it."""
    record(database, running, make_steps([1.0] * 100, skipped=[3, 60, 90]))
    record(database, running, make_steps([1.0] * 50, first=51, skipped=[90]))
    with database.reading() as session:
        assert session.get_one(Run, running.id).skipped == 2


def test_points_far_apart_are_summed_up_however_many_come_at_once(
    database: Database, running: Run
) -> None:
    """Points that are far apart are summarized, however many arrive at once."""
    steps = range(200, 200 * 601, 200)
    for some in (steps, (200 * 601,)):
        record(database, running, events=[make_metric(step, step / 200, "far") for step in some])
    with database.reading() as session:
        [far] = windows.measure(session, running.id)
    assert (far.points, far.high) == (601, 601.0)


def test_runs_do_not_mix(database: Database, running: Run) -> None:
    """A rebuild of one run does not change another's blocks."""
    record(database, running, make_steps([1.0] * 100))
    written = _stones(database)
    with database.writing() as session:
        _rebuild(session, running.id + 1)
    assert _stones(database) == written


def test_merging_by_steps_is_merging_at_once() -> None:
    """Merging steps by sixteen or one after the other gives the same extremes and counts."""
    rng = np.random.default_rng(0)
    step = np.arange(512)
    points = Points(step, step * 5, np.zeros_like(step), rng.normal(size=(512, 2)))
    at_once = merge(Summaries.of(points), 512)
    by_steps = merge(merge(merge(Summaries.of(points), 8), 64), 512)
    for name in ("steps", "low", "high", "low_step", "high_step", "nonfinite"):
        assert getattr(at_once, name).tolist() == getattr(by_steps, name).tolist()
    np.testing.assert_allclose(at_once.mean, by_steps.mean)


def test_mean_of_numbers_whose_sum_overflows() -> None:
    """The mean of the largest floats does not overflow, however they are merged."""
    largest = np.finfo(np.float64).max
    step = np.arange(200)
    values = np.where(step < 100, largest, -largest)[:, None]
    values[7], values[8] = np.inf, 1.0
    points = Points(step, step * 5, np.zeros_like(step), values)
    finite = values[np.isfinite(values)]
    small = merge(Summaries.of(points), 64)
    assert small.mean[0, 0] == pytest.approx(largest * (62 / 63))
    assert small.mean[2, 0] == -largest
    assert merge(small, 512).mean[0, 0] == pytest.approx(np.mean(finite / 256) * 256)


def _rebuild(session: Session, run_id: int) -> None:
    step_block_writer.rebuild(session.connection(), run_id)


def _stones(database: Database) -> list[tuple[Any, ...]]:
    with database.reading() as session:
        table = StepBucket.__table__
        return [tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))]


def test_a_series_without_known_values_has_no_extremes(database: Database, running: Run) -> None:
    """In an integer series, which has no NaN, a count of 0 marks a missing value."""
    steps = make_steps([1.0] * 130)
    steps["data_us"][:64] = UNKNOWN_US
    record(database, running, steps)
    with database.reading() as session:
        source = StepSource.of(running.id)
        [found] = source.read_buckets(session.connection(), [(64, 0, 2)]).values()
    assert np.isnan(found.high[0, -1])
    assert found.nonfinite[:, -1].tolist() == [63, 1, 0]
    assert found.low[1, -1] == steps["data_us"][64:127].min()


def test_a_series_that_was_not_kept_yet_has_no_mean() -> None:
    """A series that older summaries lack has no mean in them."""
    rows = np.zeros(2, layout(pyramid.STEP_SERIES[:-1], 64))
    rows["steps"] = 64
    packed = [row.tobytes() for row in rows]
    found = unpack(np.array([0, 64]), packed, pyramid.STEP_SERIES, 64)
    assert np.isnan(found.mean[:, -1]).all()
