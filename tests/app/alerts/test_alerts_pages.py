"""The page of alerts, and the API with the same functions."""

import re
from typing import Any

import pytest
from sqlalchemy import insert, select
from starlette.testclient import TestClient

from db.alerts import alert_evaluation
from db.alerts.alert_evaluation import Seen, evaluate
from db.database import Database
from db.settings import Settings
from db.tables import AlertRule, Channel, Delivery, Run, Status

pytestmark = [pytest.mark.slow, pytest.mark.sql_sample, pytest.mark.usefixtures("folder")]

URL = "https://hooks.example/services/T/B/hush"


@pytest.fixture
def folder(settings: Settings) -> None:
    """The data folder, which holds the encryption key of channels."""
    settings.data.mkdir(exist_ok=True)


def post(browser: TestClient, address: str, **fields: Any) -> int:
    return browser.post(address, data=fields).status_code


def end_and_report(database: Database, run: Run) -> int:
    """End a run, and evaluate the alerts of the server."""
    with database.writing() as session:
        row = session.get_one(Run, run.id)
        row.status, row.revision = Status.PAUSED, row.revision + 1
    return evaluate(database, Seen(), "http://here")


def test_rules_and_channels_are_made_switched_and_deleted(
    browser: TestClient, database: Database, running: Run
) -> None:
    """Rules and channels can be created, disabled and deleted on the page; a webhook's secret is
    shown once, its URL never.
    """
    made = browser.post("/alerts/channels", data={"kind": "webhook", "address": URL, "name": "ops"})
    [secret] = re.findall(r'class="secret">(hs_webhook_[\w-]{43})<', made.text)
    again = browser.post(
        "/alerts/channels", data={"kind": "webhook", "address": URL, "name": "ops"}
    )
    assert "is already one of your channels" in again.text
    assert f'value="{URL}"' in again.text  # what was typed
    assert browser.get("/alerts/channels").headers["location"] == "/alerts#channels"
    rule = {"scope": "run", "run_id": "1", "condition": "scale_below", "value": "1", "channel": "1"}
    assert post(browser, "/alerts/rules", **rule) == 303
    page = browser.get("/alerts").text
    assert "run 1 has a loss scale below 1" in page
    assert "hooks.example" in page
    assert secret not in page
    assert "hush" not in page + made.text
    with database.reading() as session:
        assert session.scalars(select(AlertRule.channel_ids)).one() == [1]
    for kind in ("rules", "channels"):
        assert post(browser, f"/alerts/{kind}/1/switch") == 303
        assert "(off)" in browser.get("/alerts").text
        assert post(browser, f"/alerts/{kind}/1/switch", on="1") == 303
        assert "(off)" not in browser.get("/alerts").text
    assert post(browser, "/alerts/channels/1/tests") == 303
    assert "sending" in browser.get("/alerts").text
    for kind in ("rules", "channels"):
        assert post(browser, f"/alerts/{kind}/1/deletion") == 303
        assert post(browser, f"/alerts/{kind}/1/deletion") == 404
    with database.reading() as session:
        for table in (AlertRule, Channel, Delivery):
            assert session.scalars(select(table)).all() == []


def test_errors_appear_at_their_fields(browser: TestClient) -> None:
    """Rejected input of the alert forms is preserved, and no browser stores its URL."""
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("rules", {"scope": "run", "run_id": "x", "condition": "ended"}, "'x' is not valid"),
        ("rules", {"scope": "all", "condition": "loss_above", "value": "y"}, "'y' is not valid"),
        ("rules", {"scope": "all", "condition": "loss_above"}, "allowed: a number"),
        ("channels", {"kind": "slack", "address": "ftp://h/hush"}, "Its scheme is"),
        ("channels", {"kind": "slack", "address": URL, "name": "n" * 101}, "It has 101"),
    ]
    for kind, fields, message in wrong:
        answer = browser.post(f"/alerts/{kind}", data=fields)
        assert answer.status_code == 422
        assert message in answer.text.replace("&#39;", "'")
        assert fields.get("address", "") in answer.text
        assert answer.headers["Cache-Control"] == "no-store"
    assert browser.get("/alerts?run=%22%3E%3Cscript%3E").text.count("<script>") == 0


def test_notifications_are_marked_as_read(
    browser: TestClient, database: Database, running: Run
) -> None:
    """The bell counts unread alerts; the page marks them as read; a run's button creates a rule."""
    assert browser.post("/api/v1/runs/1/alerts", json={"condition": "paused"}).status_code == 201
    assert post(browser, "/runs/1/alerts", condition="paused") == 303
    assert end_and_report(database, running) == 1
    news = browser.get("/api/v1/alerts/inbox/unread").json()
    assert news["unread"] == 1
    assert news["newest"][0]["text"] == "Run 1, digits-fp16, is paused."
    assert browser.get("/api/v1/alerts/inbox/unread?after=1").json()["newest"] == []
    assert "Mark 1 as read" in browser.get("/alerts").text
    assert post(browser, "/alerts/inbox/reading", up_to="1") == 303
    assert browser.get("/api/v1/alerts/inbox/unread").json()["unread"] == 0
    [alert] = browser.get("/api/v1/alerts/inbox").json()["alerts"]
    assert alert["read_at"] is not None


def test_the_api_does_what_the_page_does(
    script: TestClient, database: Database, running: Run
) -> None:
    """The API manages rules, channels, test messages and deliveries; a channel's secrets
    are not returned.
    """
    what = {"kind": "webhook", "address": URL}
    made = script.post("/api/v1/alerts/channels", json=what).json()
    assert made["secret"].startswith("hs_webhook_")
    [channel] = script.get("/api/v1/alerts/channels").json()
    assert channel == {key: made[key] for key in channel}
    assert "secret" not in channel
    rule = script.post("/api/v1/alerts/rules", json={"condition": "paused"}).json()
    assert (rule["text"], rule["channel_ids"]) == ("a run of mine is paused", [channel["id"]])
    assert script.get("/api/v1/alerts/rules").json() == [rule]
    script.patch(f"/api/v1/alerts/channels/{channel['id']}", json={"is_on": False})
    assert script.post(f"/api/v1/alerts/channels/{channel['id']}/tests").status_code == 201
    script.patch(f"/api/v1/alerts/channels/{channel['id']}", json={"is_on": True})
    assert end_and_report(database, running) == 1
    found = script.get("/api/v1/alerts/deliveries").json()
    assert [each["alert_id"] for each in found["deliveries"]] == [1, None]
    assert URL not in str(found)
    answer = script.post("/api/v1/alerts/rules", json={"condition": "nice"})
    assert (answer.status_code, list(answer.json()["errors"])) == (422, ["condition"])
    off = script.patch(f"/api/v1/alerts/rules/{rule['id']}", json={"is_on": False})
    assert off.json()["is_on"] is False
    assert script.delete(f"/api/v1/alerts/rules/{rule['id']}").status_code == 204
    assert script.delete(f"/api/v1/alerts/channels/{channel['id']}").status_code == 204
    assert script.get("/api/v1/alerts/inbox").json()["total"] == 1


def test_access_needs_a_session_or_a_token(stranger: TestClient, browser: TestClient) -> None:
    """Pages and forms of alerts require a session, and the API a token."""
    assert stranger.get("/alerts").status_code == 303
    assert stranger.get("/api/v1/alerts/deliveries").status_code == 401
    del browser.headers["x-csrf-token"]
    for address in ("rules", "channels", "rules/1/switch", "channels/1/tests", "inbox/reading"):
        assert post(browser, f"/alerts/{address}", up_to="1") == 403


@pytest.mark.only_on("sqlite")
def test_a_look_at_ten_thousand_runs_costs_a_few_queries(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Evaluating alerts queries only runs that are active and have changed since the last time."""
    from tests.app.looks_made import collect_queries, count_instructions

    browser.post("/api/v1/alerts/rules", json={"condition": "collapsing", "scope": "all"})
    row = {"recipe": "digits", "config": {"precision": "fp16"}, "precision": "fp16"}
    row |= {"owner_id": running.owner_id, "steps_total": 9}
    seen = Seen()
    evaluate(database, seen, "")
    with count_instructions(database) as few:
        evaluate(database, seen, "")
    with database.writing() as session:
        ended = {"status": Status.FINISHED, "ended_at": 1.0}
        session.execute(insert(Run), [{"name": f"r{n}", **row, **ended} for n in range(10_000)])
    with count_instructions(database) as many:
        evaluate(database, seen, "")
    assert many[0] <= few[0] + 2
    with database.writing() as session:
        session.add_all(Run(name=f"r{n}", **row, status=Status.RUNNING) for n in range(400))
    with collect_queries(database) as statements:
        evaluate(database, seen, "")
    assert len(statements) < 12
    with collect_queries(database) as statements:
        evaluate(database, seen, "")
    assert len(statements) <= 5
    assert alert_evaluation.MOST_RUNS > 400
