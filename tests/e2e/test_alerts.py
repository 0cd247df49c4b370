"""Alerts, from a run's page to a receiver and to the bell."""

import json
import re

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from db.alerts.alert_evaluation import Seen, evaluate
from db.database import Database
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.receivers import http_receiver
from tests.browser import open_menu


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings that allow alerts to this machine."""
    settings.data.mkdir()
    return settings.model_copy(update={"alerts_allow_private_addresses": True})


@pytest.mark.journey
def test_the_end_of_a_run_is_sent_to_a_receiver(
    database: Database, running: Run, page: Page
) -> None:
    """A channel is created and tested, and a run's preset sends a message and shows the badge."""
    with http_receiver() as hook:
        page.goto("/alerts")
        page.get_by_role("tab", name="Channels").click()
        expect(page.locator(".panel:visible")).to_have_count(1)
        page.get_by_label("URL or address").fill(hook.url)
        page.get_by_role("button", name="Add channel").click()
        expect(page.locator(".secret")).to_contain_text("hs_webhook_")
        page.get_by_role("button", name="Send test").click()
        expect(page.locator("[data-deliveries]")).to_contain_text("delivered")
        page.goto("/alerts?run=1")
        expect(page.get_by_role("heading", name="New rule")).to_be_visible()
        value = page.get_by_label("Scale", exact=True)
        expect(value).to_be_hidden()
        page.get_by_label("Condition").select_option("scale_below")
        value.fill("x")
        page.get_by_role("button", name="Add rule").click()
        expect(page.locator("#value-error")).to_contain_text("'x' is not valid")
        expect(page.get_by_label("Run number")).to_have_value("1")
        page.goto("/runs/1")
        open_menu(page)
        page.get_by_text("Alert me when…").click()
        page.get_by_role("button", name="It ends").click()
        expect(page.locator("[data-toast]")).to_have_text("You will be alerted when it ends.")
        expect(page.get_by_role("button", name="It ends")).to_be_hidden()
        with database.writing() as session:
            runs.set_status(session, session.get_one(Run, 1), Status.FINISHED)
        page.clock.install()
        page.goto("/alerts")
        bell = page.locator("[data-unread] b")
        while not bell.is_visible():
            page.clock.fast_forward(20_000)
        expect(bell).to_have_text("1")
        page.reload()
        sent = page.locator("[data-deliveries] tr", has_text="run 1")
        expect(sent).to_contain_text("delivered")
        page.get_by_role("button", name="Mark 1 as read").click()
        expect(bell).to_be_hidden()
    assert json.loads(hook.got[-1][1])["text"] == "Run 1, digits-fp16, finished."


def test_an_admin_sets_an_alert_of_the_service(ada: User, database: Database, page: Page) -> None:
    """The form offers a scope's own conditions; an alert of the service appears on the page."""
    with database.writing() as session:
        session.execute(update(User).where(User.id == ada.id).values(is_admin=True))
    page.goto("/alerts")
    page.get_by_role("button", name="New rule").click()
    condition = page.locator("[data-condition]")
    assert "backup_old" not in list_offered(page)
    page.locator("[data-scope]").select_option("service")
    assert list_offered(page)[0] == condition.input_value() == "worker_silent"
    condition.select_option("backup_old")
    page.get_by_label("Hours", exact=True).fill("24")
    page.get_by_role("button", name="Add rule").click()
    rule = page.locator("#rules tbody tr")
    expect(rule).to_contain_text("the newest complete backup is older than 24 hours")
    evaluate(database, Seen(), "http://here")
    page.reload()
    page.get_by_role("link", name="There is no complete backup.").click()
    expect(page).to_have_url(re.compile("/storage$"))


def list_offered(page: Page) -> list[str]:
    """Return the conditions in the form."""
    options = page.locator("[data-condition] option:enabled").all()
    return [option.get_attribute("value") or "" for option in options]
