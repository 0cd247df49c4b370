"""Alerts: each condition is reported once until it is resolved, by any server at any interval."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from sqlalchemy import select, update

from db.access import accounts
from db.alerts import alert_evaluation, channels, rules
from db.alerts.alert_evaluation import Seen, evaluate
from db.database import Database
from db.errors import Invalid
from db.files import erasure
from db.files.object_store import open_store
from db.queue import run_control
from db.runs import runs, trash
from db.settings import Settings
from db.tables import (
    ENDED,
    Alert,
    AlertRule,
    Delivery,
    Diagnosis,
    Run,
    RunStatus,
    Status,
    User,
)
from halfstep.telemetry.flags import NONFINITE_LOSS
from tests.db.conftest import submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

ADDRESS = "http://here"


def rule(database: Database, user: User, condition: str, scope: str = "all", **what: Any) -> int:
    with database.writing() as session:
        return rules.make(session, user, condition=condition, scope=scope, **what).id


def alerts(database: Database) -> list[Alert]:
    with database.reading() as session:
        return list(session.scalars(select(Alert).order_by(Alert.id)))


def change(database: Database, run: Run, **values: Any) -> None:
    """Change figures in a run's row, as a flush would."""
    with database.writing() as session:
        values["revision"] = Run.revision + 1
        session.execute(update(Run).where(Run.id == run.id).values(values))


def end(database: Database, run: Run, status: Status = Status.FINISHED, **how: Any) -> None:
    with database.writing() as session:
        row = session.get_one(Run, run.id)
        row.error = how.pop("error", None)
        runs.set_status(session, row, status, **how)


def test_a_condition_is_reported_once_until_it_was_resolved(
    database: Database, running: Run, ada: User
) -> None:
    """A condition that is true, still true, false, and true again raises two alerts with ends."""
    rule(database, ada, "loss_above", value=2.0)
    seen = Seen()
    result = []
    for loss in (1.0, 3.0, 4.0, 1.0, 1.5, float("inf"), 5.0):
        change(database, running, loss=loss)
        result.append(evaluate(database, seen, ADDRESS))
    assert result == [0, 1, 0, 0, 0, 1, 0]
    first, second = alerts(database)
    assert first.resolved_at is not None
    assert second.resolved_at is None
    assert first.text == "Run 1, digits-fp16, has the loss at 3, above 2."
    assert first.content["run"]["url"] == "http://here/runs/1"
    assert second.content["run"]["loss"] == "Infinity"


def test_a_restart_repeats_and_misses_nothing(database: Database, running: Run, ada: User) -> None:
    """A restarted server reports runs that ended meanwhile, and repeats no alert."""
    rule(database, ada, "ended")
    rule(database, ada, "loss_above", value=2.0)
    change(database, running, loss=3.0)
    assert evaluate(database, Seen(), ADDRESS) == 1
    assert evaluate(database, Seen(), ADDRESS) == 0
    end(database, running, Status.FAILED, error="Traceback\n  x\nValueError: no")
    assert evaluate(database, Seen(), ADDRESS) == 1
    assert evaluate(database, Seen(), ADDRESS) == 0
    assert alerts(database)[-1].text == "Run 1, digits-fp16, failed: ValueError: no."


def test_one_of_two_servers_that_poll_at_once_sends(
    database: Database, running: Run, ada: User
) -> None:
    """If two servers find a condition true at the same time, one of them sends the alert."""
    rule(database, ada, "loss_above", value=2.0)
    change(database, running, loss=3.0)
    with ThreadPoolExecutor(4) as threads:
        result = list(threads.map(lambda _: evaluate(database, Seen(), ADDRESS), range(8)))
    assert sum(result) == 1
    assert len(alerts(database)) == 1


def test_results_from_before_another_servers_write_are_dropped(
    database: Database, running: Run, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's result is dropped if another server has found the condition false meanwhile."""
    rule(database, ada, "loss_above", value=2.0)
    change(database, running, loss=3.0)
    judge, late = alert_evaluation._apply_conditions, Seen()

    def slowly(*arguments: Any) -> None:
        judge(*arguments)
        monkeypatch.setattr(alert_evaluation, "_apply_conditions", judge)
        assert evaluate(database, Seen(), ADDRESS) == 1
        change(database, running, loss=1.0)
        evaluate(database, Seen(), ADDRESS)

    monkeypatch.setattr(alert_evaluation, "_apply_conditions", slowly)
    assert evaluate(database, late, ADDRESS) == 0
    assert evaluate(database, late, ADDRESS) == 0
    assert [each.resolved_at is None for each in alerts(database)] == [False]


def test_the_index_has_room_for_one(database: Database, running: Run, ada: User) -> None:
    """The unique key of alerts stops a server without the evaluation counter from repeating one."""
    rule_id = rule(database, ada, "loss_above", value=2.0)
    change(database, running, loss=3.0)
    evaluate(database, Seen(), ADDRESS)
    with database.writing() as session:
        rows = session.get_one(AlertRule, rule_id), session.get_one(Run, running.id)
        held = [alert_evaluation._New(*rows, "", "holds")]
        found = alert_evaluation._Result(0, 0.0, 0.0, is_due=True, new=held)
        assert alert_evaluation._write(session, found, ADDRESS) == 0
    assert len(alerts(database)) == 1


def test_only_runs_that_changed_are_read(
    database: Database, running: Run, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only runs that changed are read, or all of them after a new rule."""
    read: list[list[int]] = []
    found = alert_evaluation.alert_facts.read

    def note(session: Any, some_runs: Sequence[Run], *rest: Any) -> Any:
        read.append([run.id for run in some_runs])
        return found(session, some_runs, *rest)

    monkeypatch.setattr(alert_evaluation.alert_facts, "read", note)
    rule(database, ada, "loss_above", value=2.0)
    with database.writing() as session:
        for number in range(20):
            other = Run(name=f"r{number}", recipe="digits", precision="fp16", steps_total=9)
            other.config, other.owner_id, other.status = {}, ada.id, Status.RUNNING
            session.add(other)
    seen = Seen()
    monkeypatch.setattr(alert_evaluation, "MOST_RUNS", 8)
    for _ in range(4):
        evaluate(database, seen, ADDRESS)
    assert [len(each) for each in read] == [8, 8, 5]
    change(database, running, loss=1.0)
    evaluate(database, seen, ADDRESS)
    assert read[3:] == [[running.id]]
    rule(database, ada, "loss_above", value=3.0)
    evaluate(database, seen, ADDRESS)
    assert len(read[-1]) == 8


def test_many_notifications_are_sent_in_batches(
    database: Database, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many alerts are sent in short transactions, including those of ended runs."""
    rule(database, ada, "ended")
    with database.writing() as session:
        made = [submit(session, ada).id for _ in range(5)]
    seen = Seen()
    evaluate(database, seen, ADDRESS)
    with database.writing() as session:
        for run_id in made:
            run_control.cancel(session, run_id, ada)
    monkeypatch.setattr(alert_evaluation, "MAX_ALERTS", 2)
    assert [evaluate(database, seen, ADDRESS) for _ in range(4)] == [2, 2, 1, 0]
    assert sorted(each.run_id for each in alerts(database)) == made


def test_rules_are_of_a_run_a_project_ones_own_or_all(database: Database, ada: User) -> None:
    """A rule for a run, a project, the user's own runs or all runs raises alerts for later
    events.
    """
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        made = [submit(session, owner) for owner in (ada, bob)]
        made[1].project = "vision"
    for condition, scope, what in (
        ("ended", "run", {"run_id": made[0].id}),
        ("ended", "project", {"project": "vision"}),
        ("ended", "mine", {}),
        ("ended", "all", {}),
        ("finished", "all", {}),
    ):
        rule(database, ada, condition, scope, **what)
    seen = Seen()
    evaluate(database, seen, ADDRESS)
    for run in made:
        with database.writing() as session:
            run_control.cancel(session, run.id, ada)
    evaluate(database, seen, ADDRESS)
    assert {(each.rule_id, each.run_id) for each in alerts(database)} == {
        *((1, 1), (3, 1), (4, 1), (2, 2), (4, 2))
    }
    rule(database, ada, "cancelled")
    assert evaluate(database, seen, ADDRESS) == 0


@pytest.mark.parametrize(
    ("condition", "how", "words"),
    [
        ("finished", {"status": Status.FINISHED}, "finished"),
        ("failed", {"status": Status.FAILED, "error": "E: x"}, "failed: E: x"),
        ("failed", {"status": Status.FAILED, "error": "E: x()."}, "failed: E: x()"),
        ("cancelled", {"status": Status.CANCELLED}, "was cancelled"),
        ("unreachable", {"status": Status.UNREACHABLE}, "has lost contact with its worker"),
        ("paused", {"status": Status.PAUSED}, "is paused"),
        (
            *("stopped", {"status": Status.FAILED, "failure_kind": "rule"}),
            "was stopped by a rule of its configuration",
        ),
    ],
)
@pytest.mark.only_on("sqlite")
def test_statuses(
    database: Database, running: Run, ada: User, condition: str, how: dict[str, Any], words: str
) -> None:
    """Each status has its own alert text, and earlier statuses raise none."""
    rule(database, ada, condition)
    seen = Seen()
    assert evaluate(database, seen, ADDRESS) == 0
    end(database, running, **how)
    assert evaluate(database, seen, ADDRESS) == 1
    assert alerts(database)[0].text == f"Run 1, digits-fp16, {words}."


def test_what_steps_show(database: Database, running: Run, ada: User) -> None:
    """A scale that falls over 250 steps meets every falling-scale condition; earlier steps none."""
    skipped = range(230, 251)
    steps = make_steps([1.0] * 99 + [float("nan")] + [1.0] * 150, skipped=skipped)
    steps["scale"][-1] = 2.0**-3
    steps["data_us"] = steps["step_us"]
    result = {
        "collapsing": "has a collapsing loss scale: the scale is 0.125, below 1, where it shrinks "
        "gradients; "
        "21 of 250 steps (8.4 %) were skipped, at most 21 in a row, most recently the last one",
        "dead": None,
        "oscillating": None,
        "nonfinite_loss": "had a loss that is not finite at step 100",
        "starving": "is input-bound: it waits for data for 100 % of its time",
        "loss_spike": "had a loss spike at step 240",
    }
    with_value = {
        "scale_below": (0.5, "has the loss scale 0.125, below 0.5"),
        "skips_in_a_row": (21.0, "skipped 21 steps in a row"),
        "loss_below": (1.0, None),
    }
    for condition in result:
        rule(database, ada, condition)
    for condition, (value, _words) in with_value.items():
        rule(database, ada, condition, value=value)
    rule(database, ada, "skips_in_a_row", value=22.0)
    rule(database, ada, "metric_above", metric="val/accuracy", value=0.5)
    rule(database, ada, "metric_below", metric="val/accuracy", value=0.5)
    seen = Seen()
    assert evaluate(database, seen, ADDRESS) == 0
    record(database, running, steps, events=[make_metric(10, 0.75), make_metric(5, 0.1)])
    with database.writing() as session:
        session.add(Diagnosis(run_id=running.id, kind="spike", step=240, content={}))
        session.get_one(Run, running.id).scale = 2.0**-3
    evaluate(database, seen, ADDRESS)
    words = [*result.values(), *(words for _value, words in with_value.values())]
    words.append("has val/accuracy at 0.75, above 0.5")
    assert {each.text for each in alerts(database)} == {
        f"Run 1, digits-fp16, {each}." for each in words if each
    }


@pytest.mark.parametrize("condition", ["diverged", "nonfinite_loss"])
def test_a_nonfinite_loss_is_reported_with_its_first_step_and_cause(
    database: Database, running: Run, ada: User, condition: str
) -> None:
    """A loss lost at step 102 by gradients lost at 101 is reported with these steps, not at 105."""
    rule(database, ada, condition)
    seen = Seen()
    evaluate(database, seen, ADDRESS)
    steps = make_steps([1.0] * 101 + [float("nan")] * 4)
    steps["grad_norm"][100:] = float("nan")
    site = {"node": "SqrtBackward0", "operator": "div", "file": "train.py", "line": 7}
    defect = {"kind": "undefined", "dtype": "float32", "symptom": "gradient", "step": 101}
    armed = {"event": "shadow_step", "step": 101, "armed": 4, "defects": [defect | {"site": site}]}
    record(database, running, steps, events=[armed])
    end(database, running)
    evaluate(database, seen, ADDRESS)
    [alert] = alerts(database)
    what = {
        "diverged": "finished, but diverged: its loss is not finite from step 102 on",
        "nonfinite_loss": "had a loss that is not finite at step 102",
    }[condition]
    cause = "Undefined in every precision (step 101)"
    assert alert.text == f"Run 1, digits-fp16, {what}. Cause: {cause}."


def test_a_loss_lost_before_the_recent_steps_is_dated_so(
    database: Database, running: Run, ada: User
) -> None:
    """A late rule, which reads the latest 1,000 steps, says that the loss may have been lost
    before.
    """
    record(database, running, make_steps([1.0] * 50 + [float("nan")] * 1100))
    seen = Seen()
    evaluate(database, seen, ADDRESS)
    rule(database, ada, "nonfinite_loss")
    evaluate(database, seen, ADDRESS)
    [alert] = alerts(database)
    assert "at step 151 or before" in alert.text


def test_how_runs_finish(database: Database, running: Run, ada: User) -> None:
    """Runs with all steps skipped, or with a NaN loss, are reported as such when they finish."""
    for condition in ("no_updates", "diverged"):
        rule(database, ada, condition)
    seen = Seen()
    evaluate(database, seen, ADDRESS)
    end(database, running)
    assert evaluate(database, seen, ADDRESS) == 0  # without a step it is neither
    change(database, running, step=5, skipped=5)
    evaluate(database, seen, ADDRESS)
    change(database, running, skipped=1, loss=None, last_flags=NONFINITE_LOSS)
    evaluate(database, seen, ADDRESS)
    assert [each.condition for each in alerts(database)] == ["no_updates", "diverged"]


def test_a_run_that_makes_no_step(database: Database, running: Run, ada: User) -> None:
    """A run that makes no step is reported, and resolved by its next step."""
    rule(database, ada, "no_progress", value=10.0)
    seen = Seen()
    assert evaluate(database, seen, ADDRESS) == 0
    with database.writing() as session:
        session.execute(update(RunStatus).values(time=RunStatus.time - 900))
        session.execute(update(Run).values(started_at=Run.created_at - 900))
    seen.marks = {}  # a quarter of a minute later
    assert evaluate(database, seen, ADDRESS) == 1
    steps = make_steps([1.0])
    steps["elapsed_ms"] = 890_000
    record(database, running, steps)
    evaluate(database, seen, ADDRESS)
    [alert] = alerts(database)
    assert alert.text == "Run 1, digits-fp16, made no step for 10 minutes."
    assert alert.resolved_at is not None


def test_a_measurement_makes_no_step(database: Database, running: Run, ada: User) -> None:
    """A measurement, which makes no steps, is not reported as stuck."""
    rule(database, ada, "no_progress", value=10.0)
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.config = run.config | {"lab": {"task": "precision_plan"}}
        session.execute(update(RunStatus).values(time=RunStatus.time - 900))
        session.execute(update(Run).values(started_at=Run.created_at - 900))
    assert evaluate(database, Seen(), ADDRESS) == 0


def test_channels_of_a_rule_get_one_delivery_each(
    database: Database, running: Run, ada: User, tmp_path: Any
) -> None:
    """Each enabled channel of a rule gets one delivery; an erased run's alerts are erased."""
    key = tmp_path / "key"
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        made = [
            channels.make(session, key, user, kind="email", name=name, address=f"{name}@x.example")
            for user, name in ((ada, "on"), (ada, "off"), (bob, "bob"))
        ]
        on, off, other = (channel.id for channel, _secret in made)
    rule(database, ada, "loss_above", value=1.0, channel_ids=[on, off])
    with pytest.raises(rules.Invalid, match=f"you have no channel {other}"):
        rule(database, ada, "ended", channel_ids=[other])
    with database.writing() as session:
        channels.switch(session, ada, off, is_on=False)
    rule(database, ada, "loss_above", value=2.0, scope="run", run_id=running.id)
    change(database, running, loss=3.0)
    assert evaluate(database, Seen(), ADDRESS) == 2
    with database.reading() as session:
        assert session.scalars(select(Delivery.channel_id)).all() == [on, on]
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        runs.set_status(session, run, Status.FINISHED)
        trash.delete(session, run.id, ada)
        trash.erase(session, run.id, ada)
    settings = Settings(data=tmp_path)
    erasure.erase(database, settings, open_store(settings), running.id, Event())
    with database.reading() as session:
        assert session.scalars(select(Delivery)).all() == []
        assert session.scalars(select(Alert)).all() == []
        assert [each.scope for each in session.scalars(select(AlertRule))] == ["all"]


def test_rules_are_checked_and_bounded(
    database: Database, ada: User, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid rule gets field, value and allowed values; an equal rule is created once."""
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"condition": "nice"},
            "condition: 'nice' is not valid; allowed with the scope all: ended",
        ),
        ({"condition": "ended", "scope": "x"}, "scope: 'x' is not valid; allowed: run"),
        ({"condition": "scale_below"}, "value: there is none; allowed: a number"),
        ({"condition": "loss_above", "value": float("nan")}, "value: it is nan; allowed"),
        ({"condition": "no_progress", "value": 0.5}, "allowed: a number from 1 on, the minutes"),
        ({"condition": "metric_above", "value": 1.0}, "metric: it has 0 characters"),
        ({"condition": "ended", "scope": "project"}, "project: it has 0 characters"),
        ({"condition": "ended", "scope": "run", "run_id": 99}, "run_id: there is no run 99"),
    ]
    for what, message in wrong:
        with pytest.raises(rules.Invalid, match=message):
            rule(database, ada, **what)
    first = rule(database, ada, "scale_below", value=1.0)
    with database.writing() as session:
        rules.switch(session, ada, first, is_on=False)
        bob = accounts.user_named(session, "bob")
        with pytest.raises(rules.NotFound):
            rules.delete(session, bob, first)
    assert rule(database, ada, "scale_below", value=1.0) == first
    with database.reading() as session:
        [row] = rules.rules(session, ada)
        assert row.is_on
        assert rules.describe(row) == "any run has a loss scale below 1"
    monkeypatch.setattr(rules, "MOST", 1)
    with pytest.raises(rules.Invalid, match="you have 1 rules, the maximum"):
        rule(database, ada, "ended")
    change(database, running, scale=0.5)
    with database.writing() as session:
        rules.delete(session, ada, first)
    assert evaluate(database, Seen(), ADDRESS) == 0


@pytest.mark.parametrize("status", ENDED)
def test_a_run_that_has_ended_takes_no_rule(
    database: Database, ada: User, running: Run, status: Status
) -> None:
    """A rule for an ended run never triggers."""
    end(database, running, status)
    with pytest.raises(Invalid) as refused:
        rule(database, ada, "ended", "run", run_id=running.id)
    assert f"run {running.id} is already {status}" in refused.value.errors["run_id"]
