"""Estimates of a run's cost from similar runs."""

from typing import Any

import pytest

from db.database import Database
from db.queue import estimates
from db.queue.estimates import Alike
from db.runs import trash
from db.tables import Run, User
from tests.db.conftest import config, submit
from tests.db.queue.estimates_made import add_finished

ASKED: dict[str, Any] = {
    "recipes": {"digits"},
    "precision": "fp16",
    "nodes": 1,
    "devices_per_node": 1,
    "batch_size": 8,
    "has_same_sizes": lambda _settings: True,
}


def make_alike(database: Database, **changes: Any) -> Alike:
    with database.reading() as session:
        return estimates.alike(session, **(ASKED | changes))


def test_no_estimate_without_evidence(database: Database, ada: User) -> None:
    """Unfinished, deleted and dissimilar runs give no estimate."""
    with database.writing() as session:
        submit(session, ada).steps_per_second = 5.0
    deleted = add_finished(database, ada, 3.0, 8, 10)
    with database.writing() as session:
        trash.delete(session, deleted, ada)
    result = make_alike(database, precision="bf16")
    assert result == make_alike(database) == Alike([], 0.0, 0.0, False, False)
    with database.reading() as session:
        assert [estimates.ahead(session, priority) for priority in (0, 1)] == [1, 0]
        assert estimates.checkpoint_bytes(session, [deleted]) == 10
        assert estimates.checkpoint_bytes(session, []) is None


def test_runs_of_the_same_batch_size_count_first(database: Database, ada: User) -> None:
    """An estimate is the range of the latest five speeds, and the median checkpoint size."""
    other = add_finished(database, ada, 50.0, 16)
    assert make_alike(database) == Alike([other], 50.0, 50.0, False, True)
    ids = [
        add_finished(database, ada, speed, 8, 100 * place, 10)
        for place, speed in enumerate((9.0, 2.0, 3.0, 4.0, 2.5, 3.5), 1)
    ]
    assert make_alike(database) == Alike(ids[:0:-1], 2.0, 4.0, True, True)
    with database.reading() as session:
        assert estimates.checkpoint_bytes(session, ids[1:]) == 410
    assert make_alike(database, recipes={"gpt"}).runs == []
    assert make_alike(database, devices_per_node=2).runs == make_alike(database, nodes=2).runs == []


def test_only_the_latest_runs_are_searched(
    database: Database, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only recent runs are searched, so old runs cost no time."""
    add_finished(database, ada, 3.0, 8)
    monkeypatch.setattr(estimates, "SEARCHED", 1)
    assert make_alike(database).runs == [1]
    with database.writing() as session:
        assert isinstance(submit(session, ada, config=config()), Run)
    assert make_alike(database).runs == []
