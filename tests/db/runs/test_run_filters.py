"""Filter columns are updated with their runs."""

from typing import Any

import pytest
from sqlalchemy import event, select

from db.database import Database
from db.queue import queue
from db.runs import autocomplete, grouping, runs
from db.runs.run_filters import (
    NUMBERS,
    ORDERS,
    TEXTS,
    Compared,
    EndedAs,
    Term,
    Text,
    Word,
    paths_of,
    values_of,
)
from db.tables import LatestMetric, Run, RunConfigValue, User, Worker
from db.telemetry import ingest, telemetry
from tests.db.conftest import claim, config, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def found(database: Database, name: str, sign: str, value: float | str) -> list[int]:
    number = value if isinstance(value, float) else None
    with database.reading() as session:
        terms = [Term(Compared(name, sign, number, str(value)))]
        return [run.id for run, _owner in runs.newest(session, conditions=terms)]


def latest(database: Database) -> dict[str, tuple[int, float | None]]:
    with database.reading() as session:
        return {row.name: (row.step, row.value) for row in session.scalars(select(LatestMetric))}


def test_the_latest_point_of_a_metric_counts(database: Database, running: Run) -> None:
    """A metric's latest step counts, not a late point of an earlier step or one rolled back."""
    points = [make_metric(1, 0.25), make_metric(3, 0.75), make_metric(2, 0.5)]
    record(database, running, make_steps([1.0] * 3), events=points)
    record(database, running, events=[make_metric(2, 0.9), make_metric(3, 1.0, "late")])
    assert latest(database) == {"val/accuracy": (3, 0.75), "late": (3, 1.0)}
    assert found(database, "val/accuracy", ">", 0.7) == [running.id]
    record(database, running, events=[make_metric(3, "NaN")])
    assert latest(database)["val/accuracy"] == (3, None)
    with database.writing() as session:
        telemetry.truncate(session, running.id, running.attempt, after=2)
    assert latest(database) == {"val/accuracy": (2, 0.9)}
    assert found(database, "late", ">", 0.0) == []


def test_a_watched_run_is_found_by_what_its_script_says_now(database: Database, ada: User) -> None:
    """A watched run is found by any configuration: dotted names, lists, texts, large numbers."""
    said: dict[str, Any] = {"a.lr": 1, "model": {"a": {"lr": 0.5}, "sizes": [1, 2], "on": True}}
    said |= {"text": "Some Words", "none": None, "huge": 10**400, "p" * 300: 1, "empty": {}}
    said["a"] = {"lr": 2}  # the path of the first again

    def begin(config: dict[str, Any]) -> int:
        what: dict[str, Any] = {"name": "n", "project": "", "tags": "", "host": "", "versions": {}}
        with database.writing() as session:
            where: dict[str, Any] = {"started_at": 0.0, **what}
            return ingest.begin(session, ada, "0" * 32, 1, config=config, **where).run_id

    run_id = begin(said)
    for name, sign, value in (
        ("lr", "=", 2.0),
        ("model.a.lr", "<", 1.0),
        ("sizes", "=", "[1, 2]"),
        ("on", "=", "TRUE"),
        ("text", "=", "some words"),
        ("none", "=", "null"),
    ):
        assert found(database, name, sign, value) == [run_id], name
    assert found(database, "huge", ">", 0.0) == []
    begin({"text": 5})
    assert found(database, "text", "=", 5.0) == [run_id]
    with database.reading() as session:
        assert [row.path for row in session.scalars(select(RunConfigValue))] == ["text"]


def test_names_are_listed_each_once(database: Database, ada: User) -> None:
    """Each setting is listed once, by its last part or by its path if that is ambiguous."""
    with database.writing() as session:
        for n in range(3):
            submit(session, ada, config=config(lr=0.1 * n), tags="b, a")
        one = submit(session, ada, config=config() | {"other": {"lr": 1}})
    with database.reading() as session:
        known = autocomplete.vocabulary(session)
        assert values_of(session, [1, one.id], "lr") == {1: 0.0, one.id: 1.0}
        paths = {"lr": ["other.lr", "training.lr"], "other.lr": ["other.lr"], "not": [], "a.lr": []}
        assert {name: paths_of(session, name) for name in paths} == paths
        sorted_by = {name: runs.newest(session, sort=name) for name in ("other.lr", "-lr", "-not")}
        assert [sorted_by[name][0][0].id for name in sorted_by] == [one.id, one.id, one.id]
    assert known.settings == ["lr", "other.lr", "training.lr", "settings.precision", "steps"]
    assert (known.tags, known.owners, known.recipes) == (["a", "b"], ["ada"], ["digits"])


def test_a_metric_with_the_name_of_a_column_goes_by_a_prefix(
    database: Database, ada: User, worker: Worker
) -> None:
    """A metric named like a column needs a prefix to filter, sort, show and group."""
    started = []
    for n in (3, 2, 1):
        with database.writing() as session:
            submit(session, ada, config=config() | {"step": 10 * n, "other": {"status": n}})
            run = claim(session, worker)
            assert run is not None
            queue.start(session, run.id, run.attempt)
            started.append(run)
    first, second, third = started
    for run, value in ((first, 5.0), (second, 7.0)):
        logged = [make_metric(1, value + n, name) for n, name in enumerate(NAMED)]
        record(database, run, make_steps([0.25]), events=logged)
    for n, name in enumerate(NAMED):
        called = f"metrics.{name}"
        assert found(database, called, ">", 6.0 + n) == [second.id], name
        with database.reading() as session:
            order = [run.id for run, _ in runs.newest(session, sort=called)]
            assert order == [first.id, second.id, third.id]
            order = [run.id for run, _ in runs.newest(session, sort=f"-{called}")]
            assert order == [second.id, first.id, third.id]
            ids = [first.id, third.id]
            assert values_of(session, ids, called) == {first.id: 5.0 + n}
            assert autocomplete.find_unknown(session, [called]) == []
    assert found(database, "loss", ">", 1.0) == []
    assert found(database, "settings.step", ">", 15.0) == [second.id, first.id]
    assert found(database, "settings.other.status", "=", 1.0) == [third.id]
    assert found(database, "settings.status", "=", 1.0) == [third.id]
    assert found(database, "settings.wrong.status", "=", 1.0) == []
    with database.reading() as session:
        assert paths_of(session, "settings.step") == ["step"]
        assert paths_of(session, "settings.other.status") == ["other.status"]
        known = autocomplete.vocabulary(session).metrics
        groups = grouping.group_runs(session, "recipe", names=["metrics.loss", "loss"])
        means = {name: spread.mean for name, spread in groups.groups[0].spreads.items()}
        assert means == {"metrics.loss": 6.0, "loss": 0.25}
    assert known == [*sorted(f"metrics.{name}" for name in NAMED)]


NAMED = ("loss", "step", "id", "status", "name", "duration", "skips")


@pytest.mark.only_on("sqlite")
def test_a_list_reads_no_long_rows(database: Database) -> None:
    """Filter, sort and count use a covering index instead of the long rows."""
    conditions = [
        *(Compared(name, ">", 1.0, "1") for name in NUMBERS),
        *(Text(name, "x") for name in TEXTS),
        *(Word("x"), EndedAs("no_updates"), EndedAs("diverged"), EndedAs("stopped")),
    ]
    asked: list[tuple[str, Any]] = []
    with database.reading() as session:
        event.listen(
            database.engine,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, parameters, *_: asked.append(
                (statement, parameters)
            ),
        )
        for condition in conditions:
            runs.newest(session, conditions=[Term(condition)], sort="-loss")
            runs.count(session, [Term(condition, is_negated=True)])
        for name in ORDERS.keys() - {"id", "active"}:  # rows lie by id: a page of them is read
            runs.newest(session, sort=name)
        lists = [each for each in asked if "runs.deleted_at IS NULL" in each[0]]
        connection = session.connection()
        scanned = [
            statement
            for statement, parameters in lists
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            if row.detail == "SCAN runs"
        ]
    assert len(lists) >= 2 * len(conditions) + len(ORDERS) - 2
    assert scanned == []
