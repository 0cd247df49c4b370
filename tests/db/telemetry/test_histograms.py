"""Histograms as read from both databases."""

import math
from typing import Any

from db.database import Database
from db.tables import Run
from db.telemetry import histograms
from tests.db.telemetry.telemetry_made import make_headroom, make_histogram, make_module, record


def test_modules_add_up_exponent_by_exponent() -> None:
    """Histograms of modules add up by exponent, also if they begin at different exponents."""
    body = make_module("body", -10, [1, 2, 3], zeros=4)
    head = make_module("head", -9, [10, 20, 30], nonfinite=5)
    empty = make_module("empty", 0, [], zeros=6)
    assert histograms.together([body, head, empty]) == {
        "lowest_exponent": -10,
        "counts": [1, 12, 23, 30],
        "zeros": 10,
        "nonfinite": 5,
    }
    assert histograms.together([])["counts"] == []


def test_samples_are_thinned_except_the_last(database: Database, running: Run) -> None:
    """Histograms are thinned evenly to the requested number, with the last one."""
    events = [
        make_histogram(step, make_module("body", -8, [step]), make_module("head", -8, [1]))
        for step in range(1, 12)
    ]
    record(database, running, events=events)
    with database.reading() as session:
        samples = histograms.of_module(session, running.id, "body", most=4)
        together = histograms.of_module(session, running.id, None, most=100)
        newest = histograms.newest(session, running.id)
    assert [each["step"] for each in samples] == [1, 4, 7, 10, 11]
    assert [each["counts"] for each in samples] == [[1], [4], [7], [10], [11]]
    assert [each["counts"] for each in together] == [[step + 1] for step in range(1, 12)]
    assert newest is not None
    assert newest.step == 11


def test_run_without_histograms_has_none(database: Database, running: Run) -> None:
    """A run without histograms has an empty list of them."""
    with database.reading() as session:
        assert histograms.of_module(session, running.id, None, most=4) == []
        assert histograms.newest(session, running.id) is None


def make_layers(step: int, **norms: float | str) -> dict[str, Any]:
    """Make the event of layer norms, as read from a spool."""
    result = {"layers": list(norms), "norms": list(norms.values())}
    return {"event": "layer_norms", "step": step, **result}


def test_norms_of_layers_are_rows_in_forward_order(database: Database, running: Run) -> None:
    """Each layer has a norm per step, null before it existed, with inf preserved."""
    events = [make_layers(50, body=1.0, head="Infinity"), make_layers(100, body=2.0, tail=3.0)]
    record(database, running, events=events)
    with database.reading() as session:
        found = histograms.layer_norms(session, running.id, most=10)
    assert found["steps"] == [50, 100]
    assert found["layers"] == ["body", "head", "tail"]
    assert found["norms"] == [[1.0, 2.0], ["Infinity", None], [None, 3.0]]


def test_headroom_of_modules_is_rows_in_forward_order(database: Database, running: Run) -> None:
    """A module's headroom is by the larger of activation and gradient; inf and NaN leave none."""
    looks = [
        make_headroom(50, body=(65504.0, 1.0), head=(65504 / 2**4, 65504 / 2**3)),
        make_headroom(100, head=(1.0, "NaN"), tail=(0.0, None), body=("Infinity", 1.0)),
    ]
    record(database, running, events=looks)
    with database.reading() as session:
        found = histograms.headroom_by_step(session, running.id, most=10)
    assert found["steps"] == [50, 100]
    assert found["modules"] == ["body", "head", "tail"]
    assert found["left"] == [[0.0, -math.inf], [3.0, -math.inf], [None, None]]


def test_many_norms_of_layers_are_thinned_evenly(database: Database, running: Run) -> None:
    """Layer norms are thinned evenly to the requested number, with the last one."""
    record(database, running, events=[make_layers(step, body=1.0) for step in range(1, 102)])
    with database.reading() as session:
        steps = histograms.layer_norms(session, running.id, most=10)["steps"]
    assert len(steps) <= 11
    assert steps[-1] == 101
