"""Keyboard shortcuts in a real browser."""

import re

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, User
from tests.app.conftest import start_run, submit
from tests.browser import STATUS, wait_until
from tests.db.telemetry.telemetry_made import make_steps, record

CURSOR = "document.activeElement.closest('tr')?.dataset.key"
HOSTILE = '<img src=x onerror=alert(1)> "lr:2" ' + "x" * 60


def test_runs_are_gone_through_selected_found_and_opened_by_keys(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """The keyboard cursor stays on its row as others arrive; keys in fields or with Ctrl are
    ignored.
    """
    for name in ("second", HOSTILE):
        submit(database, ada, name=name)
    page.goto("/runs")
    page.wait_for_selector("[role=combobox]")

    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate(CURSOR) == "2"
    submit(database, ada, name="fourth")
    expect(page.locator("tr[data-key]")).to_have_count(4)
    assert page.evaluate(CURSOR) == "2"
    page.keyboard.press("x")
    expect(page.get_by_label("Select second, run 2")).to_be_checked()
    page.keyboard.press("Control+j")
    page.keyboard.press("k")
    assert page.evaluate(CURSOR) == "3"

    page.keyboard.press("/")
    box = page.get_by_role("combobox", name="Filter the runs")
    expect(box).to_be_focused()
    page.keyboard.type("jkx?/")
    expect(box).to_have_value("jkx?/")
    expect(page.get_by_role("dialog")).to_have_count(0)
    box.fill("")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")  # the first one closed what was proposed
    page.keyboard.press("j")
    assert page.evaluate(CURSOR) == "3"

    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(keys).to_contain_text("Select or deselect the run")
    keys.get_by_label("Single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    page.keyboard.press("?")
    page.keyboard.press("j")
    assert page.evaluate(CURSOR) == "3"

    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Go to a page or a run")
    page.keyboard.type("keyboard")
    page.keyboard.press("Enter")
    keys.get_by_label("Single-key shortcuts").check()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type('<img src=x onerror=alert(1)> "LR:')
    expect(palette.get_by_role("option", selected=True)).to_contain_text('"lr:2"')
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/3")

    page.keyboard.press("?")
    expect(keys.get_by_text("Focus the filter")).to_be_hidden()
    expect(keys.get_by_text("Select or deselect the run")).to_be_hidden()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("1")
    palette.get_by_role("option", name="run 1,").click()
    page.wait_for_url("**/runs/1")
    page.keyboard.press("Control+k")
    page.keyboard.type("pause")
    page.keyboard.press("Enter")
    expect(page.locator(STATUS)).to_have_text("Pausing")
    page.keyboard.press("Control+k")
    page.keyboard.type("cancel run")  # of the menu, which is closed
    expect(palette.get_by_role("option", selected=True)).to_contain_text("Cancel run")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("new swe")
    page.keyboard.press("Enter")
    page.wait_for_url("**/sweeps/new")


def test_the_focus_survives_updates_of_a_live_run(
    database: Database, running: Run, page: Page
) -> None:
    """A focused link keeps the focus in live updates, and Pause passes it to Resume."""
    page.goto("/runs/1")
    link = page.get_by_label("Key figures").get_by_role("link", name="Skipped steps")
    link.focus()
    for step in (1, 2):
        record(database, running, make_steps([1.0], first=step))
        expect(page.locator('[data-fact="step"]')).to_have_text(str(step))
        expect(link).to_be_focused()
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    expect(page.locator(STATUS)).to_have_text("Pausing")
    with database.writing() as session:
        queue.end(session, 1, 1, Status.PAUSED)
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(STATUS)).to_have_text("Queued")
    expect(page.get_by_role("button", name="Pause")).to_be_focused()


def test_a_cursor_opens_its_run(database: Database, ada: User, running: Run, page: Page) -> None:
    """Enter opens the run at the cursor, which stops at the last row."""
    start_run(database, ada, name="newer")
    page.goto("/runs")
    page.wait_for_selector("[role=combobox]")
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/1")
    page.go_back()
    page.wait_for_selector("[role=combobox]")
    wait_until(page, f"{CURSOR} === '1'")
    page.keyboard.press("k")
    assert page.evaluate(CURSOR) == "2"


def test_selected_runs_are_compared_by_a_key(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """c compares the runs that x has selected, as the list of shortcuts says."""
    submit(database, ada, name="second")
    page.goto("/runs")
    for key in "jxjx":
        page.keyboard.press(key)
    expect(page.locator("[data-compare]")).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("[data-keys]")).to_contain_text("Compare the run, or the selected ones")
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.wait_for_url("**/compare?runs=*")


def test_the_key_of_the_search_works_on_every_page(running: Run, page: Page) -> None:
    """/ opens the page's own search, such as the log's, or the global one."""
    page.goto(f"/runs/{running.id}#log")
    expect(page.get_by_role("tab", selected=True)).to_have_text(re.compile("Log"))
    page.keyboard.press("/")
    expect(page.get_by_label("Search the log")).to_be_focused()
    page.goto("/workers")
    page.keyboard.press("/")
    expect(page.get_by_role("dialog", name="Go to a page or a run")).to_be_visible()


def test_a_form_starts_by_keyboard_wherever_the_focus_is(offered: None, page: Page) -> None:
    """The first field has the focus; Ctrl+Enter works from anywhere; shortcuts are documented."""
    page.goto("/runs")
    page.keyboard.press("g")
    page.keyboard.press("n")
    page.wait_for_url("**/runs/new")
    page.goto("/runs/new/command")
    expect(page.get_by_label("Command line")).to_be_focused()
    page.goto("/runs/new?recipe=digits")
    expect(page.locator("[name=precision]:checked")).to_be_focused()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    listed = {each.inner_text() for each in keys.locator("kbd").all()}
    assert "Ctrl+Enter" in listed
    keys.get_by_role("link", name="All shortcuts").click()
    page.wait_for_url("**/help/first-run#keyboard-shortcuts")
    documented = page.locator("main td code")
    assert listed <= {each.inner_text() for each in documented.all()}
    page.go_back()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Control+Enter")
    page.wait_for_url(re.compile(r"/runs/\d+$"))


@pytest.mark.parametrize(
    "path", ["runs/new?recipe=digits", "runs/new/command", "sweeps/new?recipe=digits"]
)
def test_the_button_that_starts_is_in_reach_on_a_phone(
    offered: None, page: Page, path: str
) -> None:
    """On a phone the start button stays above the navigation."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"/{path}")
    button, rail = page.locator("[data-start]"), page.locator(".rail")
    for y in (0, 300, 100_000):
        page.evaluate("y => scrollTo(0, y)", y)
        box, below = button.bounding_box(), rail.bounding_box()
        assert box
        assert below
        assert box["y"] + box["height"] <= below["y"]
        assert button.evaluate("""e => { const at = e.getBoundingClientRect()
            return document.elementFromPoint(at.x + 5, at.bottom - 3) === e }""")
