"""The live page of a run without steps, in a real browser."""

from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import User
from tests.db.conftest import CPU, add_worker, claim, submit_command
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def test_tools_come_with_the_first_metric_and_tabs_with_the_first_step(
    database: Database, ada: User, page: Page
) -> None:
    """Tools and tabs appear without a reload; before, the tab Charts explains that it is empty."""
    worker = add_worker(database, "w", [], [CPU], offers_commands=True)
    with database.writing() as session:
        submit_command(session, ada, "python it.py")
        run = claim(session, worker, commands=True)
        assert run is not None
    page.goto(f"/runs/{run.id}")
    page.locator("#tab-charts").click()
    note = page.get_by_text("appear here when the command logs the first ones")
    toolbar = page.get_by_role("toolbar", name="Charts")
    expect(note).to_be_visible()
    expect(toolbar).to_be_hidden()
    record(database, run, events=[make_metric(1, 0.5, "val/acc")])
    expect(toolbar).to_be_visible()
    expect(note).to_be_hidden()
    expect(toolbar.get_by_text("Applied")).to_be_hidden()
    expect(page.locator("#tab-skips")).to_be_hidden()
    record(database, run, make_steps([1.0]))
    expect(page.locator("#tab-skips")).to_be_visible()
    expect(toolbar.get_by_text("Applied")).to_be_visible()
