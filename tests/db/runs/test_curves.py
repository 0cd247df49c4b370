"""Single numbers of curves, compared with the same numbers of all points."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from obstore.store import MemoryStore

from db.database import Database
from db.runs import curves
from db.runs.curves import POINTS, CurveRange
from db.tables import Run, User, Worker
from db.telemetry import freeze
from tests.db.conftest import claim, submit
from tests.db.telemetry.frozen_made import end, freeze_run, reading_files
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

SCORE = "val/score"


@pytest.fixture
def run(database: Database, ada: User, worker: Worker) -> Run:
    return _start(database, ada, worker)


def _start(database: Database, owner: User, worker: Worker) -> Run:
    with database.writing() as session:
        submit(session, owner)
        run = claim(session, worker)
        assert run is not None
        return run


def _score(database: Database, run: Run, points: dict[int, float]) -> None:
    record(database, run, events=[make_metric(step, y, SCORE) for step, y in points.items()])


def _falling(count: int, seed: int = 0) -> NDArray[np.float64]:
    """Make a noisy curve from about 3 to about 1, in four bytes as a loss is stored."""
    noise = np.random.default_rng(seed).normal(scale=0.2, size=count)
    falling = 1 + 2 * np.exp(-np.arange(count) / (count / 5)) + noise
    return falling.astype(np.float32).astype(float)


def test_the_mean_of_a_curve_is_its_area_by_the_trapezoidal_rule(
    database: Database, ada: User, worker: Worker
) -> None:
    """Over the steps that all curves share, whose ends are interpolated; no value but a curve."""
    points = {1: 4.0, 3: 2.0, 4: 3.0, 8: 1.0}
    later = {2: 0.0, 6: 8.0, 10: 8.0}
    for each in (points, later, {5: 1.0}, {1: 1.0, 2: float("nan"), 9: 1.0}):
        _score(database, _start(database, ada, worker), each)
    with database.reading() as session:
        found = curves.read_curves(session, [1, 2, 3, 4, 9], SCORE)
    assert set(found) == {1, 2, 3, 4}
    shared = curves.common_range([found[1], found[2]])
    assert shared == CurveRange(2, 8, least_points=2, most_points=3)
    # At 2 the first curve is 3; at 8 the second is 8.
    assert found[1].mean(2, 8) == pytest.approx((2.5 + 2.5 + 4 * 2) / 6)
    assert found[2].mean(2, 8) == pytest.approx((4 * 4 + 2 * 8) / 6)
    assert found[1].mean(1, 8) == pytest.approx((2 * 3 + 2.5 + 4 * 2) / 7)
    assert curves.common_range([found[1], found[3]]) is None
    assert np.isnan(found[4].mean(1, 9))


def test_the_mean_of_a_long_curve_is_that_of_all_points(database: Database, run: Run) -> None:
    """Although only means of buckets are read, to a thousandth of its fall."""
    values = _falling(12_000)
    record(database, run, make_steps(values.tolist()))
    _score(database, run, dict(enumerate(values.tolist(), start=1)))
    steps = np.arange(1, len(values) + 1)
    for first, last in ((1, 12_000), (2_000, 7_777)):
        inside = (first <= steps) & (steps <= last)
        exact = np.trapezoid(values[inside], steps[inside]) / (last - first)
        with database.reading() as session:
            for name in ("loss", SCORE):
                curve = curves.read_curves(session, [run.id], name)[run.id]
                assert curve.ends == (1, 12_000)
                assert len(curve.steps) <= POINTS
                assert curve.mean(first, last) == pytest.approx(exact, abs=0.002)


@pytest.mark.parametrize("count", [50, 12_000])
@pytest.mark.parametrize("is_low", [True, False])
def test_the_time_to_a_target_is_that_of_the_first_point(
    database: Database, run: Run, count: int, is_low: bool
) -> None:
    """Not of the lowest of its bucket; a target that is never reached has none."""
    values = _falling(count)
    values[3] = float("nan")
    values[:20][::7] = np.inf if is_low else -np.inf
    values = values if is_low else -values
    record(database, run, make_steps(values.tolist()))
    _score(database, run, dict(enumerate(values.tolist(), start=1)))
    finite = values[np.isfinite(values)]
    targets = [*np.quantile(finite, np.linspace(0, 1, 12)).tolist(), *finite[[0, -1]].tolist()]
    with database.reading() as session:
        for target in targets:
            reached = (values <= target if is_low else values >= target) & np.isfinite(values)
            for name in ("loss", SCORE):
                found = curves.seconds_until(session, [run.id], name, target, is_low=is_low)
                assert found == {run.id: (1 + int(np.argmax(reached))) * 5 / 1000}
        beyond = -99.0 if is_low else 99.0
        for name in ("loss", SCORE):
            assert curves.seconds_until(session, [run.id], name, beyond, is_low=is_low) == {}


def test_a_metric_called_loss_is_read_where_steps_have_none(
    database: Database, ada: User, worker: Worker
) -> None:
    """Of a run whose steps have a loss, that one counts."""
    both, only = (_start(database, ada, worker) for _ in range(2))
    record(database, both, make_steps([3.0, 2.0, 1.0]))
    for run in (both, only):
        record(database, run, events=[make_metric(step, 9.0 - step, "loss") for step in (2, 8)])
    with database.reading() as session:
        found = curves.read_curves(session, [both.id, only.id], "loss")
        assert [found[each.id].values for each in (both, only)] == [[3.0, 2.0, 1.0], [7.0, 1.0]]
        seconds = curves.seconds_until(session, [both.id, only.id], "loss", 2.5, is_low=True)
        assert seconds == {both.id: 0.01, only.id: 0.04}


def test_curves_of_frozen_runs_are_the_same(
    database: Database, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps are in a file."""
    monkeypatch.setattr(freeze, "LEAST_STEPS", 10)
    record(database, run, make_steps(_falling(3_000).tolist()))
    end(database, run)

    def numbers(of: Database) -> list[object]:
        with of.reading() as session:
            curve = curves.read_curves(session, [run.id], "loss")[run.id]
            targets = (3.0, 2.0, 1.2, 0.9, -9.0)
            times = [
                curves.seconds_until(session, [run.id], "loss", each, is_low=True)
                for each in targets
            ]
            return [curve, *times]

    store = MemoryStore()
    with reading_files(database, store) as other:
        before = numbers(other)
        freeze_run(database, store, run, tmp_path)
        assert numbers(other) == before
