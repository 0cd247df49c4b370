"""Comparison of any runs: data of many runs in few queries."""

from typing import Any

import numpy as np
import pytest

from db.database import Database
from db.runs import comparisons
from db.runs.comparisons import Examples
from db.tables import Run, User, Worker
from db.telemetry import windows
from tests.db.conftest import claim, config, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def _start(database: Database, owner: User, worker: Worker, **changes: Any) -> Run:
    with database.writing() as session:
        submit(session, owner, **changes)
        run = claim(session, worker)
        assert run is not None
        return run


def _change(database: Database, run_id: int, **values: Any) -> None:
    with database.writing() as session:
        for name, value in values.items():
            setattr(session.get_one(Run, run_id), name, value)


def test_metrics_of_several_runs_are_those_of_each(
    database: Database, ada: User, worker: Worker
) -> None:
    """Each run has its metrics' last value, extremes and count, or an empty list."""
    found = [_start(database, ada, worker) for _ in range(3)]
    values = [0.5, float("nan"), 0.9, 0.7]
    for place, run in enumerate(found[:2]):
        events = [make_metric(step, v + place) for step, v in enumerate(values, start=1)]
        record(database, run, events=[*events, make_metric(7, place, "own")][: 5 - place])
    with database.reading() as session:
        ids = [run.id for run in found]
        result = windows.measure_by_run(session, ids)
        assert result == {run_id: windows.measure(session, run_id) for run_id in ids}
        assert [(each.name, each.value, each.high) for each in result[ids[0]]] == [
            ("own", 0.0, 0.0),
            ("val/accuracy", 0.7, 0.9),
        ]
        assert result[ids[2]] == []
        only = windows.measure_by_run(session, ids, names=["own"])
        assert [len(only[run_id]) for run_id in ids] == [1, 0, 0]


@pytest.mark.parametrize("names", [None, ["loss", "b"]])
def test_windows_of_several_runs_are_those_of_each(
    database: Database, ada: User, worker: Worker, names: list[str] | None
) -> None:
    """Windows of several runs equal those of each run, from memory or from the pyramid."""
    found = [_start(database, ada, worker) for _ in range(5)]
    for run, length in zip(found, (10, 60, 90, 9000), strict=False):
        losses = np.random.default_rng(length).normal(size=length).tolist()
        losses[3], losses[5] = float("nan"), float("inf")
        events = [make_metric(s, v, "a") for s, v in enumerate(losses, start=1)]
        events += [make_metric(4, 1.0, "b")]
        record(
            database, run, make_steps(losses, skipped=[2, 7, 8]), events=events[:: length % 4 + 1]
        )
    ids = [run.id for run in found]
    with database.reading() as session:
        for first, last in ((None, None), (5, None), (2, 40), (8, 8000)):
            zoom = {"first": first, "last": last, "most": 64, "names": names}
            of_all = windows.windows_of(session, ids, **zoom)
            each = {
                run_id: windows.windows_of(session, [run_id], **zoom).get(run_id) for run_id in ids
            }
            assert of_all == {run_id: window for run_id, window in each.items() if window}
            measured = windows.metrics_of_runs(session, ids, **zoom)
            assert measured == {
                run_id: windows.metrics_of_runs(session, [run_id], **zoom)[run_id] for run_id in ids
            }
    assert set(each) - set(of_all) >= {ids[4]}
    assert {window.bucket > 1 for window in of_all.values()} == {True, False}


def test_names_that_most_runs_have_come_first(
    database: Database, ada: User, worker: Worker
) -> None:
    """Metrics of most runs come first if there are too many, in the order of numbers."""
    for names in (("b2", "c"), ("a1", "c", "d")):
        run = _start(database, ada, worker)
        record(database, run, events=[make_metric(1, 1.0, name) for name in names])
    with database.reading() as session:
        assert comparisons.metric_names(session, [1, 2], most=9) == ["a1", "b2", "c", "d"]
        assert comparisons.metric_names(session, [1, 2], most=2) == ["c", "d"]


def test_lowest_losses_are_finite_ones(database: Database, ada: User, worker: Worker) -> None:
    """Each run has its lowest finite loss, or none."""
    for losses in ([3.0, -1.5, float("nan"), 2.0], [float("inf")] * 3, [0.5]):
        record(database, _start(database, ada, worker), make_steps(losses))
    with database.reading() as session:
        assert comparisons.lowest_losses(session, [1, 2, 3]) == {1: -1.5, 3: 0.5}


def test_forks_continue_the_count_of_examples(
    database: Database, ada: User, worker: Worker
) -> None:
    """A fork's examples count each generation by its batch size, or are unknown."""
    for _ in range(4):
        _start(database, ada, worker)
    _change(database, 1, workload={"examples": 10})
    _change(database, 2, workload={"examples": 100}, parent_id=1, parent_step=5)
    _change(database, 3, workload={"examples": 1}, parent_id=2, parent_step=7)
    _change(database, 4, workload=None)
    with database.reading() as session:
        found = [session.get_one(Run, run_id) for run_id in (3, 1, 4)]
        assert comparisons.examples(session, found) == {
            3: Examples(5 * 10 + 2 * 100, 1),
            1: Examples(0, 10),
        }
    _change(database, 2, workload=None)
    with database.reading() as session:
        assert comparisons.examples(session, [session.get_one(Run, 3)]) == {}


def test_related_runs_are_suggested_first(database: Database, ada: User, worker: Worker) -> None:
    """Suggested runs are parent, forks and group, then the newest of the recipe, but no
    measurements.
    """
    for recipe in ("digits", "digits", "other", "digits", "digits", "digits"):
        with database.writing() as session:
            submit(session, ada, recipe=recipe)
    _change(database, 2, parent_id=1)
    _change(database, 3, group_id=2)
    _change(database, 2, group_id=2)
    _change(database, 4, parent_id=2)
    with database.writing() as session:
        submit(session, ada, config=config() | {"lab": {"task": "precision_plan"}})
    _change(database, 7, parent_id=2)
    with database.reading() as session:
        offered = comparisons.likely(session, [2, 6], most=9)
        assert [(each.id, each.why) for each in offered] == [
            (4, "a fork of run 2"),
            (3, "in group 2"),
            (1, "the parent"),
            (5, "digits"),
        ]
        assert len(comparisons.likely(session, [2, 6], most=2)) == 2
