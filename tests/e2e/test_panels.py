"""Panels of a run: size, order, y range and table, which the server remembers."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from db.database import Database
from db.tables import Run
from tests.browser import LINES
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.e2e.test_access import found_on
from tests.site import until

NAMES = ("a/x", "a/y", "a/z")


@pytest.fixture
def measured(database: Database, running: Run) -> None:
    """A run with a group of three panels."""
    events = [
        make_metric(step, value + step, name)
        for value, name in enumerate(NAMES)
        for step in (1, 10, 20)
    ]
    record(database, running, make_steps([2.0] * 20), events=events)


def _open(page: Page) -> None:
    page.wait_for_selector("[data-plot=loss][data-drawn='20']")
    page.locator("[data-group='a/']").scroll_into_view_if_needed()
    page.wait_for_selector("[data-plot='a/x'][data-drawn]")


def _box(panel: Locator) -> dict[str, float]:
    box = panel.bounding_box()
    assert box is not None
    return dict(box)


def _drag(page: Page, handle: Locator, x: float, y: float) -> None:
    """Drag the middle of a handle by x, y."""
    box = _box(handle)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + x, box["y"] + y, steps=5)
    page.mouse.up()


def test_panels_are_arranged_by_pointer_and_by_keyboard(measured: None, page: Page) -> None:
    """Handles move and resize a panel, and the height of the first ones.

    A reload keeps the arrangement and the toolbar.
    """
    page.goto("/runs/1")
    _open(page)
    titles = page.locator("[data-group='a/'] h3")
    expect(titles).to_have_text([name.removeprefix("a/") for name in NAMES])

    page.get_by_role("button", name="Move a/x: 1 of 3").press("ArrowRight")
    expect(titles).to_have_text(["y", "x", "z"])
    expect(page.get_by_role("button", name="Move a/x: 2 of 3")).to_be_focused()
    last, first = page.locator("[data-row='a/z']"), page.locator("[data-row='a/y']")
    box = _box(first)
    grip = _box(last.locator("[data-move]"))
    _drag(page, last.locator("[data-move]"), box["x"] - grip["x"] + 60, box["y"] - grip["y"] + 60)
    expect(titles).to_have_text(["z", "y", "x"])

    before = _box(last)
    handle = page.get_by_role("button", name="Resize a/z: 1 column, 170 px")
    handle.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="Resize a/z: 2 columns, 190 px")).to_be_focused()
    assert _box(last)["width"] > 1.9 * before["width"]
    assert _box(last)["height"] == before["height"] + 20
    _drag(page, last.locator("[data-resize]"), before["width"], 110)
    resizer, wide = (
        last.locator("[data-resize]"),
        re.compile(r"Resize a/z: full width, (29|30)0 px"),
    )
    expect(resizer).to_have_attribute("aria-label", wide)
    assert _box(last)["width"] > 2.9 * before["width"]
    inner = "document.querySelector(\"[data-plot='a/z'] .main-svg\").getBoundingClientRect().width"
    until(lambda: page.evaluate(inner) > 2.8 * before["width"])
    assert list(found_on(page)) == []
    page.get_by_role("button", name=re.compile("Resize Loss: ")).press("ArrowDown")
    loss = page.locator("[data-row=loss] [data-resize]").get_attribute("aria-label")
    with page.expect_response("**/preferences/panels"), page.expect_response("**/toolbar"):
        page.get_by_role("radio", name="Time", exact=True).check(force=True)

    page.goto("/runs/1")
    page.wait_for_url("**/runs/1?x=time")
    _open(page)
    expect(page.locator("[data-row=loss] [data-resize]")).to_have_attribute("aria-label", loss)
    expect(titles).to_have_text(["z", "y", "x"])
    expect(resizer).to_have_attribute("aria-label", wide)
    page.set_viewport_size({"width": 390, "height": 800})
    until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390)


def test_panel_shows_its_points_as_a_table_and_keeps_a_fixed_range(
    database: Database, running: Run, measured: None, page: Page
) -> None:
    """The table has the drawn points; a fixed y range survives new steps, and is in the URL."""
    page.goto("/runs/1")
    _open(page)

    def choose(item: str) -> None:
        page.get_by_role("button", name="a/x: more").click()
        page.locator("[data-panel-menu]").get_by_role("button", name=item).click()

    choose("Show as table")
    dialog = page.get_by_role("dialog", name="a/x")
    rows = dialog.get_by_role("row")
    expect(rows).to_have_text(["stepa/x", "11", "1010", "2020"])
    assert list(found_on(page)) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)

    choose("Fix y range")
    dialog = page.get_by_role("dialog", name="Y range of a/x")
    dialog.get_by_label("From").fill("30")
    dialog.get_by_label("To").fill("5")
    dialog.get_by_role("button", name="Fix range").click()
    expect(dialog.get_by_role("alert")).to_have_text("From = 30: must be less than 5.")
    dialog.get_by_label("To").fill("50")
    dialog.get_by_role("button", name="Fix range").click()
    page.wait_for_url(re.compile(r"/runs/1\?y\.a%2Fx=30,50$"))
    expect(page.get_by_role("button", name="Reset zoom")).to_be_hidden()
    event = make_metric(30, 500.0, "a/x")
    record(database, running, make_steps([2.0] * 10, first=21), events=[event])
    until(lambda: 500 in page.evaluate(f"{LINES}.find((line) => line.name === 'a/x').y"))
    drawn = "[data-plot='a/x']"
    assert page.evaluate(f'document.querySelector("{drawn}").layout.yaxis2.range') == [30, 50]
    choose("Fix y range")
    page.get_by_role("dialog").get_by_role("button", name="Automatic").click()
    page.wait_for_url("**/runs/1")


def test_small_panels_have_their_title_once_and_sections_the_whole_width(
    measured: None, page: Page
) -> None:
    """The heading has the value at the cursor; a phone has one column."""
    for width, columns in ((1440, 3), (1024, 2), (390, 1)):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/runs/1")
        _open(page)
        panel = page.locator("[data-row='a/x']")
        panel.scroll_into_view_if_needed()
        head = panel.locator("header")
        expect(head.locator("h3")).to_have_attribute("title", "a/x")
        value = head.locator(".panel-lines .value")
        expect(value).to_have_text(re.compile(r"^[\d.]+$"))
        expect(head.locator("h3")).to_have_text("x")
        tools, shown = _box(head.locator(".tools")), _box(value.locator("b"))
        assert 0 <= tools["x"] - shown["x"] - shown["width"] <= 16
        groups = page.locator(".panel-group").all()
        assert {round(_box(group)["width"]) for group in groups} == {
            round(_box(page.locator("[data-groups]"))["width"])
        }
        tops = {round(_box(page.locator(f"[data-row='{name}']"))["y"]) for name in NAMES}
        assert len(tops) == -(-len(NAMES) // columns)
