"""The form of a command during typing."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.queue import workers
from db.runs import runs
from tests.app.conftest import CPU, DIGITS


def test_placeholders_become_fields_as_the_line_is_typed(database: Database, page: Page) -> None:
    """Each placeholder gets a row; one that is removed and typed again keeps its value."""
    offer: dict[str, Any] = {"devices": [CPU], "recipes": [DIGITS], "versions": {}}
    with database.writing() as session:
        workers.register(session, name="w", host="h", pid=1, offers_commands=True, **offer)
    page.goto("/runs")
    page.get_by_role("link", name="New run").first.click()
    page.get_by_role("link", name="Command").click()
    line, rows = page.get_by_label("Command line"), page.locator("[data-parameter]")
    line.fill("python train.py --lr {lr} --opt {opt}")
    expect(rows).to_have_count(2)
    rows.nth(0).get_by_label("Value").fill("0.1")
    rows.nth(1).get_by_label("Kind of opt").select_option("choice")
    expect(rows.nth(1).get_by_label("from")).to_be_hidden()
    rows.nth(1).get_by_label("Choices").fill("adam, sgd")
    rows.nth(1).get_by_label("Value").fill("lion")
    line.fill("python train.py --opt {opt} {{lr}}")
    expect(rows).to_have_count(1)
    line.fill("python train.py --opt {opt} --lr {lr}")
    expect(rows.nth(1).get_by_label("Value")).to_have_value("0.1")

    page.get_by_role("button", name="Start run").click()
    expect(page.get_by_role("alert")).to_contain_text("lion is not valid; allowed: one of")
    expect(rows.nth(0).get_by_label("Choices")).to_be_visible()
    rows.nth(0).get_by_label("Value").fill("sgd")
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/1")
    expect(page.locator("p.command")).to_have_text("$ python train.py --opt sgd --lr 0.1")
    with database.reading() as session:
        assert runs.get(session, 1).config == {"opt": "sgd", "lr": 0.1}


@pytest.mark.journey
def test_the_form_of_one_run_becomes_a_sweeps(database: Database, page: Page) -> None:
    """Switching a run's form to a sweep keeps the input; several values are counted, and the
    sweep begins.
    """
    offer: dict[str, Any] = {"devices": [CPU], "recipes": [DIGITS], "versions": {}}
    with database.writing() as session:
        workers.register(session, name="w", host="h", pid=1, offers_commands=True, **offer)
    page.goto("/runs/new/command")
    rows = page.locator("[data-parameter]")
    page.get_by_label("Command line").fill("python train.py --lr {lr} --batch {batch}")
    rows.nth(0).get_by_label("Value").fill("0.1")
    rows.nth(1).get_by_label("Value").fill("16")
    page.get_by_role("link", name="Sweep", exact=True).click()
    page.wait_for_url("**/sweeps/new/command")
    expect(rows.nth(1).get_by_label("Values")).to_have_value("16")
    rows.nth(0).get_by_label("Values").fill("0.1, 0.01, 0.001")
    page.get_by_role("button", name="Preview sweep").click()
    page.get_by_role("button", name="Queue 3 runs").click()
    page.wait_for_url("**/sweeps/1")
    expect(page.locator("p.command")).to_have_text("$ python train.py --lr {lr} --batch {batch}")
    with database.reading() as session:
        assert runs.get(session, 1).config == {"lr": 0.1, "batch": 16}
