"""Retention rules: preview, permissions, changes, and the files that they delete."""

import threading
from typing import Any

import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from app.trash import retention_job
from db.access import accounts, projects
from db.database import Database
from db.files import checkpoints, retention
from db.files.pruning import Rules
from db.queue import queue
from db.runs import runs
from db.runs.trash import DAY_SECONDS
from db.settings import Settings
from db.tables import AuditEvent, CheckpointFile, Status, User
from tests.app.auth.permissions_made import script_of
from tests.app.conftest import find_confirmation, start_run, submit
from tests.db.files.checkpoints_made import make_saved
from tests.marks import looped
from tests.spool_made import checkpoint_of

RULE = {"scope": "in:", "checkpoint_days": "30", "log_days": ""}


@pytest.fixture
def old(database: Database, ada: User, offered: None, settings: Settings) -> int:
    """A run with three checkpoints that ended long ago."""
    run = start_run(database, ada, name="<b>old</b>")
    with database.writing() as session:
        for step in (10, 20, 30):
            path = settings.run_folder(run.id) / "checkpoints" / f"{step}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 10)
            key = path.relative_to(settings.data).as_posix()
            checkpoints.publish(session, run.id, 1, checkpoint_of(make_saved(step)), [key])
        queue.end(session, run.id, 1, Status.FINISHED)
        runs.get(session, run.id).ended_at = DAY_SECONDS
        session.execute(update(CheckpointFile).values(created_at=DAY_SECONDS))
    return run.id


def steps(database: Database, run_id: int) -> list[int]:
    with database.reading() as session:
        return sorted(row.step for row in checkpoints.of_run(session, run_id))


def test_a_rule_is_previewed_before_it_is_set_and_then_acts(
    database: Database, browser: TestClient, settings: Settings, old: int
) -> None:
    """The preview lists the files and deletes nothing; if they change meanwhile, it is shown again.

    Once set, the rule deletes them, and further passes delete nothing else.
    """
    assert "No rules: nothing is deleted" in browser.get("/retention").text
    page = browser.post("/retention", data=RULE).text
    assert "This would delete 20 B of checkpoints of 1 run now" in page
    assert "&lt;b&gt;old&lt;/b&gt;" in page
    assert "2 steps&#39; checkpoints" in page
    with database.reading() as session:
        assert retention.list_rules(session) == []
        assert (
            session.scalars(select(AuditEvent).where(AuditEvent.action == "POST /retention")).all()
            == []
        )
    changed = {**RULE, "log_days": "5", "confirmed": find_confirmation(page)}
    assert "Set the rule" in browser.post("/retention", data=changed).text
    retention_job.prune_due(settings, database, threading.Event())
    assert steps(database, old) == [10, 20, 30]
    done = browser.post("/retention", data=RULE | {"confirmed": find_confirmation(page)})
    assert done.headers["location"] == "/retention"
    for _ in range(2):
        retention_job.prune_due(settings, database, threading.Event())
        assert steps(database, old) == [30]
    assert sorted(each.name for each in (settings.run_folder(old) / "checkpoints").iterdir()) == [
        "30.pt"
    ]
    assert ">30 days<" in browser.get("/retention").text
    with database.reading() as session:
        [action] = session.scalars(select(AuditEvent).where(AuditEvent.action == "POST /retention"))
        assert action.detail == "scope in:, checkpoint_days 30"
    browser.post("/retention/deletion", data={"scope": "in:"})
    assert "No rules: nothing is deleted" in browser.get("/retention").text


def test_a_projects_rule_overrides_that_of_the_instance(
    database: Database, ada: User, old: int
) -> None:
    """A project's retention rule overrides that of the instance, and active runs are not pruned."""
    with database.writing() as session:
        projects.make(session, "vision")
        retention.set_rule(session, ada, None, Rules(checkpoint_days=30))
        retention.set_rule(session, ada, None, Rules(checkpoint_days=20))
        assert retention.due(session) == [(old, Rules(20, None))]
        retention.set_rule(session, ada, "", Rules(log_days=40_000))
        assert retention.due(session) == []
        retention.end_rule(session, "")
        assert retention.due(session) == [(old, Rules(20, None))]
        runs.get(session, old).status = Status.RUNNING
        assert retention.due(session) == []


@looped(
    "changes, text",
    [
        ({"checkpoint_days": ""}, "Both fields are empty; allowed: days in one of them"),
        ({"checkpoint_days": "0.5"}, "Checkpoints: 0.5 is not valid; allowed: 1 to 36,500"),
        ({"log_days": "nan"}, "Logs and samples: nan is not valid"),
        ({"log_days": "<i>"}, "Logs and samples: &lt;i&gt; is not valid"),
        ({"scope": "x"}, "allowed: all, or in:PROJECT"),
    ],
)
def test_invalid_rules_are_rejected(
    browser: TestClient, changes: dict[str, Any], text: str
) -> None:
    """Errors of a retention rule are at their fields, with the input and the allowed values."""
    page = browser.post("/retention", data=RULE | changes)
    assert page.status_code == 422
    assert text in page.text


@pytest.mark.slow
def test_only_who_manages_a_project_sets_its_rule(
    app: Any, database: Database, ada: User, offered: None
) -> None:
    """A maintainer sets the rule of the own project only, not the instance's nor a hidden
    project's; a member sets none.
    """
    submit(database, ada)
    with database.writing() as session:
        for name in ("vision", "hidden"):
            projects.make(session, name)
        people = {role: accounts.make_user(session, role) for role in ("maintainer", "member")}
        for role, user in people.items():
            projects.set_role(session, user, "vision", role)
        retention.set_rule(session, ada, "hidden", Rules(log_days=3))
    allowed = {("maintainer", "in:vision"): 200, ("member", "in:vision"): 403}
    for (role, scope), status in allowed.items():
        script = script_of(app, database, people[role])
        assert script.post("/retention", data={**RULE, "scope": scope}).status_code == status
        assert script.post("/retention", data={**RULE, "scope": "all"}).status_code == 403
        assert script.post("/retention", data={**RULE, "scope": "in:hidden"}).status_code == 404
        assert script.post("/retention/deletion", data={"scope": "all"}).status_code == 403
        assert "in:hidden" not in script.get("/retention").text
    with database.reading() as session:
        assert [rule.project for rule in retention.list_rules(session)] == ["hidden"]
