"""Summary numbers of curves, compared with those of all points."""

import numpy as np
import pytest
from numpy.typing import NDArray

from db.database import Database
from db.runs import curves
from db.runs.curves import CurveRange, NotComparable
from db.tables import Run, User, Worker
from tests.db.conftest import claim, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.marks import extended

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
    """Return a noisy curve from about 3 to about 1, as float32."""
    noise = np.random.default_rng(seed).normal(scale=0.2, size=count)
    falling = 1 + 2 * np.exp(-np.arange(count) / (count / 5)) + noise
    return falling.astype(np.float32).astype(float)


def _areas(
    database: Database, runs: list[int], name: str = SCORE
) -> tuple[CurveRange, dict[int, float]]:
    with database.reading() as session:
        return curves.areas(session, name, curves.read_curves(session, runs, name))


def test_the_mean_of_a_curve_is_its_area_by_the_trapezoidal_rule(
    database: Database, ada: User, worker: Worker
) -> None:
    """A curve's mean is its trapezoidal area over the shared steps; one value or a NaN has none."""
    points = {1: 4.0, 3: 2.0, 4: 3.0, 8: 1.0, 9: 2.0}
    later = {2: 0.0, 3: 6.0, 6: 8.0, 8: 8.0, 9: 1.0, 10: 8.0}
    for each in (points, later, {5: 1.0}, {1: 1.0, 2: float("nan"), 9: 1.0}, {7: float("nan")}):
        _score(database, _start(database, ada, worker), each)
    with database.reading() as session:
        found = curves.read_curves(session, [1, 2, 3, 4, 5, 9], SCORE)
    assert [run_id for run_id, curve in found.items() if curve.is_finite] == [1, 2, 3]
    assert set(found) == {1, 2, 3, 4}
    shared, means = _areas(database, [1, 2])
    assert shared == CurveRange(3, 9, points=3, buckets=None)
    assert means[1] == pytest.approx((5 * 1.5 + 1.5) / 6)
    assert means[2] == pytest.approx((5 * 7 + 4.5) / 6)
    with pytest.raises(NotComparable, match="0 steps in common"):
        _areas(database, [1, 3])


def test_the_mean_of_a_long_curve_is_that_of_all_points(
    database: Database, ada: User, worker: Worker
) -> None:
    """The mean of a long curve by buckets is exact to a thousandth of its fall."""
    for length in (12_000, 24_000):
        values = np.tile(_falling(12_000), 2)[:length].tolist()
        run = _start(database, ada, worker)
        record(database, run, make_steps(values))
        _score(database, run, dict(enumerate(values, start=1)))
    exact = np.trapezoid(_falling(12_000)) / 11_999
    for name in ("loss", SCORE):
        shared, means = _areas(database, [1, 2], name)
        assert (shared.first, shared.last, shared.points) == (1, 12_000, 12_000)
        assert shared.buckets is not None
        assert shared.buckets < curves.MOST_POINTS
        assert means[1] == pytest.approx(exact, abs=0.002)
        assert means[2] == means[1]


def test_long_curves_are_compared_only_at_the_same_steps(
    database: Database, ada: User, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long curves are averaged in buckets only at equal steps; of a short range all points are
    read.
    """
    monkeypatch.setattr(curves, "MOST_POINTS", 1_000)
    values = _falling(4_000).tolist()
    every, other, short = (
        dict(zip(range(1, 1 + len(some) * step, step), some, strict=True))
        for some, step in ((values, 1), (values[::2], 2), (values[:900:3], 3))
    )
    holed = {step: value for step, value in every.items() if step % 7}
    for each in (every, other, holed, short):
        _score(database, _start(database, ada, worker), each)
    for some in ([1, 2], [2, 3], [1, 3], [2], [3]):
        with pytest.raises(NotComparable, match="more than 1,000 points, and not all have each"):
            _areas(database, some)
    shared, means = _areas(database, [1, 4])
    assert shared == CurveRange(1, 898, points=300, buckets=None)
    assert means[1] == means[4]


@pytest.mark.parametrize("most", [1_000, 10_000])
def test_curves_have_the_same_steps_whatever_their_values_are(
    database: Database, ada: User, worker: Worker, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Curves are compared up to the shorter one's end, whatever values they have."""
    monkeypatch.setattr(curves, "MOST_POINTS", most)
    values = dict(enumerate(_falling(3_000).tolist(), start=1))
    nan = float("nan")
    alike = [
        values,
        dict.fromkeys(values, 1.0),
        values | {1: nan, 700: nan, 3_000: nan},
        {step: value for step, value in values.items() if step <= 800},
        {step: value for step, value in values.items() if step <= 2_000},
    ]
    others = [
        {step: value for step, value in values.items() if step != 3},
        {step: value for step, value in values.items() if step % 5 == 0},
        {step: value for step, value in values.items() if step > 1},
    ]
    for each in (*alike, *others):
        _score(database, _start(database, ada, worker), each)
    with database.reading() as session:
        found = curves.read_curves(session, range(1, 9), SCORE)
    assert found[1].is_bucketed == (most == 1_000)
    for one in range(1, 6):
        assert all(curves.have_same_steps(found[one], found[n]) for n in range(1, 6))
        assert not any(curves.have_same_steps(found[one], found[n]) for n in (6, 7, 8))


@pytest.mark.parametrize("first", [1, 2**40 + 1, *extended([64, 1_000, 524_289, 1_048_577])])
@pytest.mark.parametrize("count", [1_024, 5_000, *extended([1_000, 1_023, 1_025])])
def test_the_first_point_is_found_after_a_gap_of_steps(
    database: Database, run: Run, first: int, count: int
) -> None:
    """The first point below a target is found at any position in its buckets."""
    values = _falling(count)
    _score(database, run, {0: 9.0} | dict(enumerate(values.tolist(), start=first)))
    targets = [*np.quantile(values, np.linspace(0, 1, 6)).tolist(), *values[[0, -1]].tolist()]
    values[-1] = values.min() - 1
    _score(database, run, {first + count - 1: float(values[-1])})
    with database.reading() as session:
        for target in (*targets, float(values[-1])):
            found = curves.seconds_until(session, [run.id], SCORE, target, is_low=True)
            assert found == {run.id: (first + int(np.argmax(values <= target))) * 5 / 1000}


@pytest.mark.parametrize("gap", [500_000, 2**30])
def test_the_first_step_is_found_after_a_gap_of_steps(
    database: Database, run: Run, gap: int
) -> None:
    """The first step below a target is found also if steps before it were not recorded."""
    values = _falling(1_500)
    record(database, run, make_steps([9.0]), make_steps(values.tolist(), first=gap))
    with database.reading() as session:
        for target in (*np.quantile(values, (0, 0.1, 0.9)).tolist(), float(values[-1])):
            found = curves.seconds_until(session, [run.id], "loss", target, is_low=True)
            assert found == {run.id: (gap + int(np.argmax(values <= target))) * 5 / 1000}


@pytest.mark.parametrize("count", [50, 12_000])
@pytest.mark.parametrize("is_low", [True, False])
def test_the_time_to_a_target_is_that_of_the_first_point(
    database: Database, run: Run, count: int, is_low: bool
) -> None:
    """The time to a target is that of the first point, not of the bucket's minimum."""
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
    """A metric named loss is read only if a run's steps have no loss."""
    both, only = (_start(database, ada, worker) for _ in range(2))
    record(database, both, make_steps([3.0, 2.0, 1.0]))
    for run in (both, only):
        record(database, run, events=[make_metric(step, 9.0 - step, "loss") for step in (2, 8)])
    with database.reading() as session:
        found = curves.read_curves(session, [both.id, only.id], "loss")
        assert [found[each.id].values for each in (both, only)] == [[3.0, 2.0, 1.0], [7.0, 1.0]]
        seconds = curves.seconds_until(session, [both.id, only.id], "loss", 2.5, is_low=True)
        assert seconds == {both.id: 0.01, only.id: 0.04}
