"""Windows: few points with every extreme and every event of the raw steps."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from db.database import Database
from db.tables import Run
from db.telemetry import windows
from db.telemetry.windows import Line, Measured, Ticks, Window
from tests.db.telemetry.telemetry_made import (
    forget,
    make_events,
    make_metric,
    make_skip,
    make_steps,
    record,
)

SERIES = ("loss", "grad_norm", "grad_norm_clipped", "lr", "step_us", "data_us")


def look(database: Database, run: Run, **zoom: Any) -> Window:
    with database.reading() as session:
        window = windows.windows_of(session, [run.id], **zoom).get(run.id)
        assert window is not None
        return window


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([1, 50, 700, 5000, 40_000]),
    most=st.sampled_from([32, 50, 333]),
    rarity=st.sampled_from([2, 30, 1000]),
    zooms=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4),
)
@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_window_keeps_every_extreme_and_every_event(
    database: Database,
    running: Run,
    seed: int,
    length: int,
    most: int,
    rarity: int,
    zooms: list[tuple[float, float]],
) -> None:
    """For any losses, batches and zoom, a window agrees with the raw steps."""
    steps, events = _history(seed, length, rarity)
    forget(database, running)
    cuts = np.random.default_rng(seed).integers(1, length + 1, 3)
    record(database, running, *_parts(steps, cuts), events=events)
    for one, other in [*zooms, (0.0, 1.0)]:
        first, last = sorted((1 + int(one * (length - 1)), 1 + int(other * (length - 1))))
        window = look(database, running, first=first, last=last, most=most)
        _assert_true(window, steps[first - 1 : last], most)


def _history(seed: int, length: int, rarity: int) -> tuple[NDArray[Any], list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    losses = rng.normal(size=length).astype(np.float32)
    losses[rng.integers(0, rarity, length) == 0] *= 1000
    losses[rng.integers(0, rarity, length) == 0] = np.nan
    losses[rng.integers(0, rarity, length) == 0] = np.inf
    skipped = (np.flatnonzero(rng.integers(0, rarity, length) == 0) + 1).tolist()[:400]
    return make_steps(losses.tolist(), skipped=skipped), make_events(skipped)


def _parts(steps: NDArray[Any], cuts: NDArray[Any]) -> list[NDArray[Any]]:
    return [part for part in np.split(steps, sorted(cuts)) if len(part)]


def _assert_true(window: Window, raw: NDArray[Any], most: int) -> None:
    assert (window.first, window.last) == (raw["step"][0], raw["step"][-1])
    assert window.total == len(raw)
    assert window.points <= most
    for name in SERIES:
        _assert_line(
            window.series[name], dict(zip(raw["step"].tolist(), raw[name].tolist(), strict=True))
        )
        assert len(window.series[name].x) <= most
    _assert_scale(window.series["scale"], raw, most)
    _assert_ticks(window.skips, raw["step"][raw["flags"] & 1 > 0], window.bucket, most)
    nonfinite = raw["step"][~np.isfinite(raw["loss"])]
    _assert_ticks(window.series["loss"].nonfinite, nonfinite, window.bucket, most)


def _assert_line(line: Line, raw: dict[int, float]) -> None:
    """Check that every point is a real one, and that the finite extremes are among them."""
    assert line.x == sorted(set(line.x))
    drawn = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isinstance(y, float | int)]
    assert all(raw[x] == y for x, y in drawn)
    finite = [value for value in raw.values() if np.isfinite(value)]
    if finite:
        values = [y for _, y in drawn]
        assert (min(values), max(values)) == (min(finite), max(finite))
    assert line.nonfinite.total == len(raw) - len(finite)


def _assert_scale(line: Line, raw: NDArray[Any], most: int) -> None:
    """Check that each point holds until the next, or that extremes are included."""
    assert len(line.x) <= most
    changes = np.count_nonzero(raw["flags"][:-1] & 1)
    if changes <= most - 2:
        latest = np.searchsorted(line.x, raw["step"], side="right") - 1
        assert np.array(line.y)[latest].tolist() == raw["scale"].tolist()
    else:
        assert (min(line.y), max(line.y)) == (raw["scale"].min(), raw["scale"].max())


def _assert_ticks(ticks: Ticks, happened: NDArray[Any], bucket: int, most: int) -> None:
    """Check that ticks are single if they fit, or else counted in their bucket."""
    assert ticks.total == sum(ticks.counts) == len(happened)
    assert len(ticks.steps) <= most
    if len(happened) <= most:
        assert ticks.steps == happened.tolist()
    else:
        counted = Counter((happened // bucket).tolist())
        assert [step // bucket for step in ticks.steps] == sorted(counted)
        assert ticks.counts == [counted[key] for key in sorted(counted)]


def test_close_zoom_is_raw(database: Database, running: Run) -> None:
    """A window with at most as many steps as points has each step, non-finite ones as texts."""
    record(database, running, make_steps([1.0, float("nan"), float("inf"), -float("inf")] * 100))
    window = look(database, running, first=101, last=104)
    assert window.bucket == 1
    assert window.series["loss"] == Line(
        [101, 102, 103, 104],
        [1.0, "NaN", "Infinity", "-Infinity"],
        Ticks([102, 103, 104], [1] * 3, 3),
    )


def test_a_scale_set_by_hand_is_drawn_where_it_was_first_used(
    database: Database, running: Run
) -> None:
    """A scale set by hand is drawn from its event's step on, and overrides a back-off there."""
    steps = make_steps([1.0] * 99, skipped=[3])
    steps["scale"][3:] = 64.0
    steps["scale"][6:] = 32.0
    by_hand = [
        make_skip(step, kind="set", optimizer=None, scale_after=scale)
        for step, scale in ((7, 32.0), (4, 64.0))
    ]
    record(database, running, steps, events=[*by_hand, *make_events([3])])
    line = look(database, running, most=32).series["scale"]
    assert (line.x, line.y) == ([1, 4, 7, 99], [2.0**20, 64.0, 32.0, 32.0])


def test_growing_run_moves_no_point(database: Database, running: Run) -> None:
    """Appending steps does not change full buckets that are drawn."""
    rng = np.random.default_rng(0)
    losses = rng.normal(size=1500).tolist()
    record(database, running, make_steps(losses[:1100]))
    before = look(database, running, most=100)
    record(database, running, make_steps(losses[1100:], first=1101))
    after = look(database, running, most=100)
    assert before.bucket == after.bucket == 64
    assert _until(after.series["loss"], 1088) == _until(before.series["loss"], 1088)


def _until(line: Line, end: int) -> list[tuple[int, Any]]:
    return [(x, y) for x, y in zip(line.x, line.y, strict=True) if x < end]


def test_means_and_times_are_those_of_the_buckets(database: Database, running: Run) -> None:
    """A bucketed line has the mean of each bucket, and the window the time at its ends."""
    steps = make_steps(np.arange(1000.0).tolist())
    record(database, running, steps)
    window = look(database, running, most=32)
    line = window.series["loss"]
    assert window.bucket == 128
    assert line.mean_x[1] == 192
    assert line.mean_y[1] == pytest.approx(steps["loss"][127:255].mean())
    assert window.elapsed_ms.x == [1, 127, 255, 383, 511, 639, 767, 895, 1000]
    assert window.elapsed_ms.y == [5 * x for x in window.elapsed_ms.x]


def test_run_without_steps_has_no_window(database: Database, running: Run) -> None:
    """Without steps in the range there is no window."""
    with database.reading() as session:
        assert windows.windows_of(session, [running.id]).get(running.id) is None
    record(database, running, make_steps([1.0] * 10))
    with database.reading() as session:
        assert windows.windows_of(session, [running.id], first=11).get(running.id) is None


def test_window_of_too_few_points_is_rejected(database: Database, running: Run) -> None:
    """A window of fewer than 32 points is rejected, since it cannot have ends and extremes."""
    record(database, running, make_steps([1.0]))
    with database.reading() as session, pytest.raises(ValueError, match="at least 32"):
        windows.windows_of(session, [running.id], most=31).get(running.id)


def test_metrics_have_the_same_windows(database: Database, running: Run) -> None:
    """Windows of metrics keep their extremes too, and those of few points are whole."""
    values = np.random.default_rng(0).normal(size=3000).tolist()
    values[1234], values[2345] = float("nan"), 99.0
    many = [make_metric(s, v, "loss/generator") for s, v in enumerate(values, start=1)]
    few = [make_metric(step, step / 3000) for step in range(500, 3001, 500)]
    record(database, running, events=[*many, *few])
    with database.reading() as session:
        lines = windows.metrics_of_runs(session, [running.id], most=100)[running.id]
        result = windows.measure(session, running.id)
    assert list(lines) == ["loss/generator", "val/accuracy"]
    assert lines["val/accuracy"].x == [500, 1000, 1500, 2000, 2500, 3000]
    generator = lines["loss/generator"]
    assert len(generator.x) <= 100
    assert (min(generator.y), max(generator.y)) == (np.nanmin(values), 99.0)
    assert generator.x[generator.y.index(99.0)] == 2346
    assert generator.nonfinite.total == 1
    assert result == [
        Measured("loss/generator", 3000, values[-1], np.nanmin(values), 99.0, 3000),
        Measured("val/accuracy", 3000, 1.0, 500 / 3000, 1.0, 6),
    ]


def test_metric_that_is_not_a_number_is_the_latest_all_the_same(
    database: Database, running: Run
) -> None:
    """A metric's latest value is the last step's, even a NaN, which is no extreme."""
    points = [make_metric(1, 0.5), make_metric(3, "NaN"), make_metric(2, "NaN", "a")]
    record(database, running, events=points)
    with database.reading() as session:
        found = windows.measure(session, running.id)
    assert all(math.isnan(each.value) for each in found)
    assert [replace(each, value=0.0) for each in found] == [
        Measured("a", 2, 0.0, None, None, 1),
        Measured("val/accuracy", 3, 0.0, 0.5, 0.5, 2),
    ]
