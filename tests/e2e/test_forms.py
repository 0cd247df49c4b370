"""Forms by keyboard: Tab to a field, type, Enter or Space, and the announced result."""

import re

import pytest
from playwright.sync_api import Page, expect

from db.access import projects
from db.alerts import rules
from db.database import Database
from db.files import retention
from db.runs import notes, presets
from db.tables import User
from tests.app.conftest import submit
from tests.e2e.test_access import found_on

MOST_TABS = 200
#: Properties that identify the focused element: its accessible name.
FOCUSED = """(() => { const at = document.activeElement
    return at.getAttribute('aria-label') || at.labels?.[0]?.innerText || at.innerText || '' })()"""


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element with this name has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if re.match(name, page.evaluate(FOCUSED).strip()):
            return
    pytest.fail(f"{page.url}: no Tab leads to {name}")


def typed(page: Page, name: str, text: str) -> None:
    tab_to(page, name)
    page.keyboard.press("Control+a")
    page.keyboard.type(text)


def received(page: Page, text: str) -> None:
    """Return the announcement: the status that changed since the page was loaded."""
    expect(page.get_by_role("status").filter(has_text=text)).to_be_visible()


@pytest.mark.journey
def test_each_form_is_filled_and_answered_by_keyboard(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """Projects, retention, notes, presets and alert rules are edited by keyboard; axe finds
    nothing on each page with its announcement, in either theme.
    """
    submit(database, ada)
    submit(database, ada)
    violations: list[str] = []

    page.goto("/projects")
    typed(page, "Name", "vision")  # the first field of that name gives roles
    while page.evaluate("document.activeElement.name") != "name":
        typed(page, "Name", "vision")
    page.keyboard.press("Enter")
    received(page, "The project is created.")
    typed(page, "New name", "sight")
    page.keyboard.press("Enter")
    received(page, "The project is renamed to sight.")
    violations += found_on(page)
    tab_to(page, "Delete project sight")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    received(page, "The project sight is deleted.")

    page.goto("/retention")
    typed(page, "Checkpoints", "30")
    page.keyboard.press("Enter")
    received(page, "This would delete nothing now")
    tab_to(page, "Set the rule")
    page.keyboard.press("Enter")
    received(page, "The rule is set.")
    violations += found_on(page)

    page.goto("/notes?runs=1,2")
    typed(page, "Note", "# Why")
    tab_to(page, "Save")
    page.keyboard.press("Space")
    received(page, "The note is saved.")
    violations += found_on(page)

    page.goto("/runs/new?recipe=digits")
    tab_to(page, "Save as a preset")
    page.keyboard.press("Enter")
    typed(page, "Name of the preset", "quick")
    tab_to(page, "Save")
    page.keyboard.press("Space")
    received(page, "The preset quick is saved.")
    violations += found_on(page)

    page.goto("/alerts")
    tab_to(page, "New rule")
    page.keyboard.press("Enter")
    tab_to(page, "Condition")
    page.keyboard.type("A run fails"[:5])
    tab_to(page, "Add rule")
    page.keyboard.press("Enter")
    received(page, "The rule is added.")
    violations += found_on(page)
    page.reload()
    expect(page.get_by_text("The rule is added.")).to_have_count(0)

    assert violations == []
    with database.reading() as session:
        assert [each.name for each in projects.listed(session)] == [""]
        assert [rule.checkpoint_days for rule in retention.listed(session)] == [30]
        assert notes.read(session, notes.of_runs([1, 2])) == "# Why"
        assert [each.name for each in presets.matching(session, [""])] == ["quick"]
        assert len(rules.rules(session, ada)) == 1
