"""Selecting, tagging, deleting, restoring and annotating runs."""

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.queue import queue, run_control
from db.runs import run_metadata
from db.tables import Run, Status, User
from tests.app.conftest import submit


def test_restored_checkboxes_count_after_going_back(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """Checkboxes that the browser restores count for the bar, because Delete would apply to
    them.
    """
    submit(database, ada)
    page.route("**/live?*", lambda route: route.abort())  # updates count the ticked runs again
    page.goto("/runs")
    page.locator("[data-rows] [name=run]").nth(0).check()
    page.locator("[data-rows] [name=run]").nth(1).check()
    page.locator("[data-rows] .name a").first.click()
    page.wait_for_url("**/runs/2")
    page.go_back()
    expect(page.locator("[data-rows] [name=run]:checked")).to_have_count(2)
    expect(page.locator("[data-ticked]")).to_have_text("2 selected")


@pytest.mark.journey
def test_many_are_selected_deleted_and_restored(
    database: Database, ada: User, page: Page, running: Run
) -> None:
    """Shift selects a range, which survives live updates; failed deletions are named, others
    undone.
    """
    for _ in range(3):
        submit(database, ada)
    with database.writing() as session:
        for run_id in (2, 3):
            run_control.cancel(session, run_id, ada)
    page.goto("/runs?filter=digits")
    total = page.locator("[data-total]")
    expect(total).to_have_text("4 runs match")
    box = page.locator("[name=run]")
    expect(page.locator("[data-selection]")).to_be_hidden()
    box.nth(1).click()
    box.nth(3).click(modifiers=["Shift"])
    count = page.locator("[data-ticked]")
    expect(count).to_have_text("3 selected")
    expect(page.locator("[data-compare]")).to_have_attribute("href", "/compare?runs=1,3,2")
    with database.writing() as session:
        run_metadata.edit(session, 4, ada, {"name": "renamed meanwhile"})
        queue.end(session, running.id, 1, Status.QUEUED)
    expect(page.locator("[data-rows]")).to_contain_text("renamed meanwhile")
    expect(page.locator("[name=run]:checked")).to_have_count(3)
    page.get_by_role("button", name="Tag", exact=True).click()
    page.get_by_label("Tag", exact=True).fill("kept")
    page.keyboard.press("Enter")
    expect(page.locator("[data-rows] .tag")).to_have_count(3)
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("[data-refused]")).to_contain_text("Run 1 is queued")
    expect(count).to_have_text("1 selected")
    expect(box).to_have_count(2)
    expect(total).to_have_text("2 runs match")
    page.get_by_role("button", name="Undo").click()
    expect(box).to_have_count(4)
    expect(total).to_have_text("4 runs match")


def test_the_trash_asks_before_deleting_for_ever(
    database: Database, ada: User, page: Page, offered: None
) -> None:
    """In the trash the dialog names the runs before they are deleted, and Cancel keeps them."""
    for _ in range(2):
        submit(database, ada)
    page.goto("/runs")
    page.get_by_label("Select all runs on this page").check()
    page.get_by_role("button", name="Cancel selected").click()
    expect(page.locator("tr .status[data-status=cancelled]")).to_have_count(2)
    page.locator("[data-tick-all]").first.check()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".empty")).to_be_visible()
    expect(page.locator("[data-toast]")).to_contain_text("2 runs in the trash.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("[data-rows] [name=run]")).to_have_count(2)
    expect(page.locator("[data-toast]")).to_have_text("2 runs restored.")
    page.locator("[data-tick-all]").first.check()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".empty")).to_be_visible()
    page.get_by_role("link", name="Trash").click()
    asks = page.get_by_role("dialog")
    page.get_by_role("button", name="Delete run 2 permanently").click()
    expect(asks).to_contain_text("run 2, and 0 B of files permanently?")
    page.keyboard.press("Escape")
    expect(asks).to_be_hidden()
    page.get_by_role("button", name="Restore run 1").click()
    expect(page.locator("[data-rows] tr")).to_have_count(1)
    page.get_by_role("button", name="Delete run 2 permanently").click()
    asks.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_text("being deleted permanently")).to_be_visible()


def test_conflicting_notes_are_both_preserved(
    database: Database, ada: User, page: Page, running: Run
) -> None:
    """Another user's edit of a note is shown live, or next to the draft."""
    page.goto(f"/runs/{running.id}")
    with database.writing() as session:
        run_metadata.edit(session, running.id, ada, {"name": "baseline", "note": "*theirs*"})
    expect(page.locator(".note em")).to_have_text("theirs")
    expect(page.get_by_role("heading", level=1)).to_have_text("baseline")
    page.get_by_role("button", name="Edit").click()
    expect(page.locator("#label-note")).to_have_value("*theirs*")
    with database.writing() as session:
        run_metadata.edit(session, running.id, ada, {"note": "newer"})
    page.locator("#label-note").fill("# Mine")
    page.keyboard.press("Control+Enter")
    expect(page.locator("[data-label-problem]")).to_contain_text("This was changed in the meantime")
    expect(page.locator(".note")).to_have_text("newer")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".note h2")).to_have_text("Mine")
    expect(page.get_by_role("button", name="Edit")).to_be_focused()
    page.get_by_role("button", name="Edit").click()
    page.locator("#label-name").fill(" ")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#label-name-error")).to_contain_text("allowed: 1 to 100 characters")
