"""Forms by keyboard: Tab to a field, type, Enter or Space, and an announced result."""

import re

import pytest
from playwright.sync_api import Page, expect

from db.access import projects
from db.alerts import rules
from db.database import Database
from db.files import retention
from db.runs import notes, presets
from db.settings import Settings
from db.tables import User
from tests.app.conftest import submit
from tests.e2e.test_access import UNFOLD, fill, found_on, settings  # noqa: F401 - fixture

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


def type_text(page: Page, name: str, text: str) -> None:
    tab_to(page, name)
    page.keyboard.press("Control+a")
    page.keyboard.type(text)


def read_announcement(page: Page, text: str) -> None:
    """Return the announced status, if it changed since the page was loaded."""
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
    type_text(page, "Name", "vision")  # the first field of that name gives roles
    while page.evaluate("document.activeElement.name") != "name":
        type_text(page, "Name", "vision")
    page.keyboard.press("Enter")
    read_announcement(page, "The project is created.")
    type_text(page, "New name", "sight")
    page.keyboard.press("Enter")
    read_announcement(page, "The project is renamed to sight.")
    violations += found_on(page)
    tab_to(page, "Delete project sight")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    read_announcement(page, "The project sight is deleted.")

    page.goto("/retention")
    type_text(page, "Checkpoints", "30")
    page.keyboard.press("Enter")
    read_announcement(page, "This would delete nothing now")
    tab_to(page, "Set the rule")
    page.keyboard.press("Enter")
    read_announcement(page, "The rule is set.")
    violations += found_on(page)

    page.goto("/notes?runs=1,2")
    type_text(page, "Note", "# Why")
    tab_to(page, "Save")
    page.keyboard.press("Space")
    read_announcement(page, "The note is saved.")
    violations += found_on(page)

    page.goto("/runs/new?recipe=digits")
    tab_to(page, "Save as a preset")
    page.keyboard.press("Enter")
    type_text(page, "Name of the preset", "quick")
    tab_to(page, "Save")
    page.keyboard.press("Space")
    read_announcement(page, "The preset quick is saved.")
    violations += found_on(page)

    page.goto("/alerts")
    tab_to(page, "New rule")
    page.keyboard.press("Enter")
    tab_to(page, "Condition")
    page.keyboard.type("A run fails"[:5])
    tab_to(page, "Add rule")
    page.keyboard.press("Enter")
    read_announcement(page, "The rule is added.")
    violations += found_on(page)
    page.reload()
    expect(page.get_by_text("The rule is added.")).to_have_count(0)

    assert violations == []
    with database.reading() as session:
        assert [each.name for each in projects.list_projects(session)] == [""]
        assert [rule.checkpoint_days for rule in retention.list_rules(session)] == [30]
        assert notes.read(session, notes.of_runs([1, 2])) == "# Why"
        assert [each.name for each in presets.matching(session, [""])] == ["quick"]
        assert len(rules.rules(session, ada)) == 1


#: Pages with fields, folded or not.
WITH_FIELDS = (
    "/account",
    "/alerts",
    "/audit",
    "/notes?runs=1,2",
    "/people",
    "/projects",
    "/reports/1/edit",
    "/reports/new?runs=1,2&metrics=loss",
    "/retention",
    "/runs/1",
    "/runs/1/precision-plan",
    "/runs/new/command",
    "/runs/new?recipe=digits",
    "/secrets",
    "/sweeps/new/agents",
    "/sweeps/new/command",
    "/sweeps/new?recipe=digits",
)
#: Returns what of the visible fields of forms is not where it belongs.
MISPLACED = """() => {
    const wrong = [], ids = new Set()
    const box = (each) => each.getBoundingClientRect()
    const isSeen = (each) => each && box(each).height > 1
    const note = (what, each) => wrong.push(`${what}: ${each.outerHTML.slice(0, 120)}`)
    for (const each of document.querySelectorAll('[id]'))
        if (ids.has(each.id)) note('second of its id', each); else ids.add(each.id)
    const typed = 'input:not([type=hidden], [type=file], [type=search]), select, textarea'
    const control = `:scope > :is(${typed})`
    for (const each of document.querySelectorAll('form[method=post] :is(' + typed + ')'))
        if (isSeen(each) && !each.closest('.field, .segments, .pick, .ticks'))
            note('no field', each)
    for (const field of document.querySelectorAll('.field')) {
        const at = field.querySelector(control)
        const label = field.querySelector(':scope > :is(label, span)')
        if (!isSeen(at)) continue
        const isTick = at.type === 'checkbox'
        if (isTick ? box(label).left < box(at).right : box(label).bottom > box(at).top)
            note('label', field)
        if (!isTick && Math.abs(box(label).left - box(at).left) > 1) note('left of label', field)
        for (const below of field.querySelectorAll(':scope > :is(.hint, .error)'))
            if (isSeen(below) && box(below).top < box(at).bottom) note('below', field)
    }
    for (const actions of document.querySelectorAll('.form .actions')) {
        const first = actions.querySelector('button')
        if (!isSeen(first)) continue
        if (box(first).left - box(actions).left > 1 || actions.children[0] !== first)
            note('first action', actions)
        const filled = actions.querySelector('.primary')
        if (filled && filled !== first) note('filled is not first', actions)
        for (const field of actions.closest('.form').querySelectorAll('.field')) {
            const isOwn = field.parentElement.closest('.form, .form > *') === actions.parentElement
            if (isSeen(field) && isOwn && box(field).bottom > box(actions).top + 1)
                note('above a field', actions)
        }
    }
    return wrong
}"""


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_all_forms_have_one_layout(
    settings: Settings,  # noqa: F811
    database: Database,
    ada: User,
    page: Page,
    width: int,
) -> None:
    """In all forms labels are above, hints and errors below, and the first action is at the
    left.
    """
    fill(settings, database, ada)
    page.set_viewport_size({"width": width, "height": 900})
    misplaced = {}
    for path in WITH_FIELDS:
        page.goto(path)
        page.evaluate(UNFOLD)
        for opened in page.locator("[popover]:has(.field)").all():
            opened.evaluate("each => each.showPopover()")
            misplaced[path, opened.get_attribute("id")] = page.evaluate(MISPLACED)
            opened.evaluate("each => each.hidePopover()")
        misplaced[path, None] = page.evaluate(MISPLACED)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    wrong = [f"{place}: {each}" for place, found in misplaced.items() for each in found]
    assert "\n".join(wrong) == ""


def test_an_error_stands_at_its_field(page: Page) -> None:
    """A field with an error is marked as invalid and described by it."""
    page.goto("/secrets")
    page.get_by_label("Name").fill("lower case")
    page.get_by_label("Name").evaluate("each => each.removeAttribute('pattern')")
    page.get_by_label("Value").fill("12345678")
    page.get_by_role("button", name="Set secret").click()
    name = page.get_by_label("Name")
    expect(name).to_have_attribute("aria-invalid", "true")
    expect(name).to_have_attribute("aria-describedby", "name-hint name-error")
    expect(page.locator(".field.wrong .error")).to_be_visible()
    assert "\n".join(found_on(page)) == ""


def test_help_texts_stay_in_place_while_tabbing(offered: None, page: Page) -> None:
    """A clipped help text has no link that would scroll it, and the shortcut is named."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/new?recipe=digits")
    page.locator(".main-settings input").first.focus()
    for _ in range(12):
        page.keyboard.press("Tab")
    scrolled = "[...document.querySelectorAll('.main-settings *')].filter((each) => each.scrollTop)"
    assert page.evaluate(f"{scrolled}.length") == 0
    links = page.locator(".main-settings .hint a")
    assert links.count() > 0
    for link in links.all():
        inside = link.evaluate("each => getComputedStyle(each.parentElement).overflow")
        assert inside == "visible"
    expect(page.locator(".submit")).to_contain_text("Ctrl+Enter starts")


def test_only_the_wrong_field_of_a_parameter_is_marked(page: Page) -> None:
    """Only an invalid parameter's field is marked, and Ctrl+Enter starts a command too."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/new/command")
    page.get_by_label("Command line").fill("python train.py --lr {lr}")
    row = page.locator("[data-parameter=lr]")
    tops = {each.evaluate("each => each.offsetTop") for each in row.locator(".field:visible").all()}
    assert len(tops) == 1
    page.get_by_label("Command line").press("Control+Enter")
    page.wait_for_load_state()
    expect(page.locator("[data-mistakes]")).to_contain_text("{lr} is empty")
    wrong = page.locator("[data-parameter=lr] [aria-invalid=true]")
    expect(wrong).to_have_count(1)
    expect(wrong).to_have_attribute("name", "parameter.lr.value")
    assert "\n".join(found_on(page)) == ""
