"""Histograms as they come out of both databases."""

from db import histograms
from db.database import Database
from db.tables import Run
from tests.db.telemetry_made import make_histogram, make_module, record


def test_modules_add_up_exponent_by_exponent() -> None:
    """Windows that begin elsewhere are laid over each other; empty ones add their zeros."""
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


def test_samples_are_thinned_but_for_the_last(database: Database, running: Run) -> None:
    """About as many as asked for, evenly, in order of step, of one module or of all."""
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
    """There is nothing to thin."""
    with database.reading() as session:
        assert histograms.of_module(session, running.id, None, most=4) == []
        assert histograms.newest(session, running.id) is None
