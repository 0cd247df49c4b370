"""The page of an uploaded check in a browser."""

import re

from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import User
from halfstep.check.report import read
from tests.app.checks.checks_made import (
    CLIP,
    LOSS,
    OVERFLOW,
    ROUNDING,
    SOURCE,
    add_check,
    full_report,
    report,
)
from tests.e2e.test_access import found_on
from tests.site import until

LINE = "document.querySelector('[aria-current]').closest('tr').id"
#: Whether the selected line is below the header of its source and above the lower edge.
IN_VIEW = """(() => {
    const line = document.querySelector('[aria-current]').closest('tr').getBoundingClientRect()
    const header = document.querySelector('.source > header').getBoundingClientRect()
    return line.top >= header.bottom && line.bottom <= innerHeight
})()"""


def test_a_check_is_read_line_by_line(database: Database, ada: User, page: Page) -> None:
    """J and K move through the marked lines, and each finding has the report's text."""
    add_check(database, ada)
    page.set_viewport_size({"width": 1440, "height": 500})
    page.goto("/projects")
    page.get_by_role("link", name="Checks").last.click()
    page.get_by_role("link", name="train.py").click()
    code = page.locator("tr[id] .src > code")
    assert code.all_text_contents() == SOURCE.splitlines()
    assert "script" not in page.title()

    rows = {row.title: row for row in full_report().rows}
    lines = [f"L{number}" for number in (ROUNDING, OVERFLOW, LOSS, CLIP)]
    for line in lines:
        if line != lines[0]:
            page.keyboard.press("j")
            until(lambda: page.evaluate(IN_VIEW))
        assert page.evaluate(LINE) == line
        for finding in page.locator(".finding:visible").all():
            row = rows.pop(finding.get_by_role("heading", level=2).inner_text())
            plain = [text.replace("`", "") for text in (row.text, row.advice, row.fix) if text]
            texts = finding.locator("[data-text], [data-advice], pre").all_text_contents()
            assert texts == plain
    assert not rows
    page.keyboard.press("j")
    assert page.evaluate(LINE) == lines[-1]
    for line in reversed(lines[:-1]):
        page.keyboard.press("k")
        assert page.evaluate(LINE) == line
        until(lambda: page.evaluate(IN_VIEW))
    expect(page.get_by_role("button", name="Previous marked line")).to_be_disabled()
    page.get_by_role("button", name="Next marked line").click()
    assert page.evaluate(LINE) == lines[1]
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(keys.get_by_text("Next, previous marked line")).to_be_visible()
    expect(keys.get_by_text("Down, up in the list of runs")).to_be_hidden()


def test_a_line_has_an_address_and_other_lines_fold(
    database: Database, ada: User, page: Page
) -> None:
    """A clicked line is in the URL, without scrolling; Marked hides all other lines."""
    add_check(database, ada)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"/checks/1#L{CLIP}")
    expect(page.locator(".finding:visible h2")).to_have_text("Scaled gradients are clipped")
    page.goto("/checks/1")
    expect(page.locator(".finding:visible h2")).to_have_text("A value is rounded away in fp16")
    page.locator(f"#L{OVERFLOW}").click()
    expect(page.locator(".finding:visible h2")).to_have_text("Overflow of fp16")
    assert page.evaluate("[scrollY, location.hash]") == [0, f"#L{OVERFLOW}"]

    folded = page.get_by_role("button", name=re.compile(r"^36 unmarked lines, 26 to 61$"))
    expect(page.locator("#L30")).to_be_hidden()
    folded.click()
    expect(page.locator("#L30")).to_be_visible()
    expect(folded).to_have_count(0)
    page.get_by_role("radio", name="Marked 4").check()
    expect(page.locator("tr[id]:visible")).to_have_count(4)
    assert "\n".join(found_on(page)) == ""


def test_a_check_fits_a_phone(database: Database, ada: User, page: Page) -> None:
    """A check does not scroll sideways at any width; values are below the code with names."""
    long = {"script": f"{'long_' * 30}.py"}
    for made in (full_report(), full_report(**long), report()):
        add_check(database, ada, made)
    for path in ("/checks", "/checks/1", "/checks/2", "/checks/3"):
        page.goto(path)
        for width in (320, 390, 768, 1024, 1280, 2560):
            page.set_viewport_size({"width": width, "height": 844})
            until(
                lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width
            )
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/checks/1")
    line = page.locator(f"#L{OVERFLOW}")
    code, value = (
        line.locator("code").first.bounding_box(),
        line.get_by_text("1.59e6").bounding_box(),
    )
    assert code is not None
    assert value is not None
    assert value["y"] >= code["y"] + code["height"]
    line.click()
    expect(page.locator(".finding:visible h2")).to_be_in_viewport()


def test_a_check_is_downloaded_and_deleted(database: Database, ada: User, page: Page) -> None:
    """The downloaded file of a check can be passed to `--baseline`."""
    add_check(database, ada)
    page.goto("/checks/1")
    page.get_by_role("button", name="More actions").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as JSON").click()
    assert read(download.value.path()) == full_report()
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No checks yet")).to_be_visible()
