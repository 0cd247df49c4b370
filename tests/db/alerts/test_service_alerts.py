"""Alerts of the service: workers, queue, disk and backups."""

from pathlib import Path

import pytest
from obstore.store import LocalStore
from sqlalchemy import select, update

from db.alerts import alerts, rules, service_conditions
from db.alerts.alert_evaluation import TIMED_SECONDS, Seen, evaluate
from db.alerts.channels import make as make_channel
from db.alerts.deliveries import take
from db.alerts.rules import describe
from db.database import Database
from db.errors import Invalid
from db.files.backup import back_up
from db.tables import Alert, AlertRule, Backup, Delivery, Run, RunStatus, User, Worker
from tests.db.conftest import submit


@pytest.fixture
def operator(database: Database, ada: User) -> User:
    """A user who is an admin."""
    with database.writing() as session:
        session.execute(update(User).where(User.id == ada.id).values(is_admin=True))
    ada.is_admin = True
    return ada


def rule(database: Database, user: User, condition: str, value: float | None = None) -> AlertRule:
    """Return a new rule for the service."""
    with database.writing() as session:
        return rules.make(session, user, condition=condition, scope=rules.SERVICE, value=value)


def texts(database: Database, user: User, *, is_open: bool = True) -> list[str]:
    """Evaluate, and return the texts of a user's alerts, oldest first."""
    evaluate(database, Seen(), "http://here")
    with database.reading() as session:
        page = alerts.list_alerts(session, user, limit=50)
        found = [row for (row,) in page.rows if (row.resolved_at is None) == is_open]
        assert all(row.run_id is None for row in found)
        return [row.text for row in found[::-1]]


@pytest.mark.usefixtures("running")
def test_a_silent_worker_alerts_once_until_it_reports(database: Database, operator: User) -> None:
    """Each silent worker has its own alert until it reports; a stopped one has none."""
    rule(database, operator, "worker_silent", 5)
    assert texts(database, operator) == []
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=Worker.seen_at - 720))
        name = session.scalars(select(Worker.name)).one()
    [text] = texts(database, operator)
    assert text.startswith(f"Worker {name} has not reported for 12 min ")
    assert len(texts(database, operator)) == 1
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=Worker.seen_at + 720))
    assert texts(database, operator) == []
    assert len(texts(database, operator, is_open=False)) == 1
    with database.writing() as session:
        session.execute(update(Worker).values(seen_at=0.0, stopped_at=1.0))
    assert texts(database, operator) == []


@pytest.mark.usefixtures("running")
def test_a_worker_of_another_version_is_named(database: Database, operator: User) -> None:
    """An alert for a worker of another version has both versions."""
    rule(database, operator, "worker_outdated")
    with database.writing() as session:
        session.execute(update(Worker).values(versions={"halfstep": "0.0.9", "protocol": "1"}))
    [text] = texts(database, operator)
    assert "has version 0.0.9 (protocol 1); this server" in text


def test_a_queue_in_which_nothing_starts_alerts(
    database: Database, operator: User, running: Run
) -> None:
    """Runs that wait while others start raise no alert."""
    rule(database, operator, "queue_stuck", 30)
    with database.writing() as session:
        queued = submit(session, operator)
        project = queued.project
        session.execute(update(RunStatus).values(time=RunStatus.time - 3600))
    [text] = texts(database, operator)
    assert text.startswith(f"1 run of {project} wait")
    with database.writing() as session:
        session.execute(
            update(RunStatus)
            .where(RunStatus.run_id == running.id)
            .values(time=RunStatus.time + 3600)
        )
    assert texts(database, operator) == []


def test_a_full_disk_is_of_its_server(
    database: Database, operator: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk's alert belongs to its server, and another server's space does not resolve it."""
    rule(database, operator, "disk_low", 1e9)
    seen = Seen(folder=tmp_path)
    assert evaluate(database, seen, "http://here") == 1
    with database.writing() as session:
        session.execute(update(AlertRule).values(value=1e-9))
    with monkeypatch.context() as patched:
        patched.setattr(service_conditions.socket, "gethostname", lambda: "other")
        evaluate(database, Seen(folder=tmp_path), "http://here")
        with database.reading() as session:
            assert session.scalars(select(Alert.resolved_at)).one() is None
    evaluate(database, Seen(folder=tmp_path), "http://here")
    with database.reading() as session:
        assert session.scalars(select(Alert.resolved_at)).one() is not None


def test_backups_that_are_old_or_fail_alert(
    database: Database, operator: User, tmp_path: Path
) -> None:
    """Backups that are old, failed or missing raise alerts."""
    rule(database, operator, "backup_old", 24)
    rule(database, operator, "backup_failed")
    assert texts(database, operator) == ["There is no complete backup."]
    (tmp_path / "file").touch()
    with pytest.raises(Invalid):
        back_up(database, LocalStore(tmp_path / "data", mkdir=True), tmp_path / "file" / "backup")
    assert texts(database, operator)[1].startswith("The newest backup failed: folder: ")
    back_up(database, LocalStore(tmp_path / "data", mkdir=True), tmp_path / "backup")
    assert texts(database, operator) == []
    with database.writing() as session:
        session.execute(update(Backup).values(ended_at=Backup.ended_at - 25 * 3600))
    assert "The newest complete backup is 1 d 1 h old." in texts(database, operator)


def test_a_damaged_run_alerts_until_it_is_whole(
    database: Database, operator: User, running: Run
) -> None:
    """A damaged run alerts, unless it is in the trash."""
    rule(database, operator, "run_damaged")
    assert texts(database, operator) == []
    for values in ({"damage": "Run 1 is damaged."}, {"deleted_at": 1.0}):
        with database.writing() as session:
            session.execute(update(Run).values(**values))
        is_listed = "damage" in values
        assert texts(database, operator) == ["Run 1 is damaged."] * is_listed


def test_only_admins_have_alerts_of_the_service(
    database: Database, operator: User, tmp_path: Path
) -> None:
    """Only admins get alerts of the service; a former admin gets neither alerts nor deliveries."""
    with database.writing() as session:
        row = session.get_one(User, operator.id)
        slack = {"kind": "slack", "name": "", "address": "https://here.example/x"}
        make_channel(session, tmp_path / "key", row, **slack, forbidden="")
    rule(database, operator, "backup_old", 24)
    assert len(texts(database, operator)) == 1
    with database.writing() as session:
        session.execute(update(User).values(is_admin=False))
    with database.writing() as session:
        assert [taken.is_visible for taken in take(session)] == [False]
        session.execute(update(Alert).values(resolved_at=1.0))
    operator.is_admin = False
    assert texts(database, operator) == []
    with pytest.raises(Invalid, match="service is only for admins"):
        rule(database, operator, "backup_failed")


def test_rules_have_the_conditions_of_their_scope(database: Database, operator: User) -> None:
    """Rules for runs and for the service have their own conditions, described with numbers."""
    made = rule(database, operator, "worker_silent", 5)
    assert describe(made) == "a worker does not report for 5 minutes"
    with pytest.raises(Invalid, match="allowed with the scope service: worker_silent, "):
        rule(database, operator, "failed")
    with pytest.raises(Invalid, match="a number from 1 on, the hours of this condition"):
        rule(database, operator, "backup_old", 0)
    with database.writing() as session, pytest.raises(Invalid, match="with the scope all: ended"):
        rules.make(session, operator, condition="backup_failed", scope=rules.ALL)


def test_the_service_is_evaluated_at_an_interval(database: Database, operator: User) -> None:
    """The service is evaluated at an interval, and at once after a new rule."""
    seen = Seen()
    rule(database, operator, "backup_old", 24)
    assert evaluate(database, seen, "http://here") == 1
    with database.writing() as session:
        session.execute(update(Alert).values(resolved_at=1.0))
    assert evaluate(database, seen, "http://here") == 0
    seen.service_at -= TIMED_SECONDS
    assert evaluate(database, seen, "http://here") == 1
    with database.reading() as session:
        content = session.scalars(select(Alert.content).order_by(Alert.id.desc())).first()
        assert session.scalar(select(Delivery.id)) is None
    assert content
    assert (content["subject"], content["url"]) == ("", "http://here/storage")


def test_the_condition_decides_on_a_scope_that_is_not_given(
    database: Database, operator: User
) -> None:
    """A rule without a scope gets that of its condition, as `halfstep alert add backup_failed`."""
    with database.writing() as session:
        scopes = [
            rules.make(session, operator, condition=condition, scope="").scope
            for condition in ("backup_failed", "failed")
        ]
    assert scopes == [rules.SERVICE, rules.MINE]
