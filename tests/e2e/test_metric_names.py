"""A run with many metrics in a real browser: all have panels, visible ones have points."""

import re
from collections.abc import Sequence

import pytest
from playwright.sync_api import Page, expect

from app.telemetry.metric_names import MOST_SHOWN
from db.access import chart_preferences
from db.database import Database
from db.tables import Run, User
from tests.browser import wait_until
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

MANY = 2000
NAMES = [f"layer{number // 50:02d}/unit{number % 50:02d}" for number in range(MANY)]
PANELS = """() => [...document.querySelectorAll('.chart-panel h3')].map((each) => each.title)
    .filter((name) => name.startsWith('layer'))"""
#: Plots that exist: each has one listener of the theme and one element of Plotly.
PLOTS = "() => document.querySelectorAll('.js-plotly-plot').length"
#: Different last steps of the lines in view.
LAST_STEPS = """() => [...new Set([...document.querySelectorAll('[data-drawn]')].filter((plot) => {
    const { top, bottom } = plot.getBoundingClientRect()
    return bottom > 0 && top < innerHeight
}).flatMap(({ data }) => data.filter(({ yaxis, mode }) => yaxis === 'y2' && mode !== 'none'))
    .map(({ x }) => x.at(-1)))]"""
#: Texts of numbers that are wider than what shows them.
CUT = """() => [...document.querySelectorAll('.panel-grid .panel-lines b')].filter((value) => {
    const [box, list] = [value, value.closest('.panel-lines')]
        .map((each) => each.getBoundingClientRect())
    const isOut = box.right > list.right + 0.5 && box.top < list.bottom
    return isOut || value.scrollWidth > value.clientWidth
}).map((each) => each.textContent)"""


def log(database: Database, run: Run, step: int, names: Sequence[str] = NAMES) -> None:
    """Record a step with its metrics."""
    events = [make_metric(step, -0.00012345 * step, name) for name in names]
    record(database, run, make_steps([1.0], first=step), events=events)


@pytest.fixture
def asked(page: Page) -> list[str]:
    """Return the URLs of metric points that the page requests."""
    result: list[str] = []

    def note(address: str) -> None:
        if "/metrics/series" in address:
            result.append(address)

    page.on("request", lambda request: note(request.url))
    return result


@pytest.fixture
def many(database: Database, running: Run, page: Page) -> Run:
    """A run with many metrics, and its page."""
    log(database, running, 1)
    log(database, running, 2)
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    page.get_by_role("button", name="Unfold all").click()
    return running


def at_panel(page: Page, name: str) -> None:
    """Scroll to the panel of a metric and wait until it is drawn."""
    page.locator(f"[data-row='{name}']").scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-plot='{name}'][data-drawn]")


def test_the_last_of_many_metrics_is_drawn_when_it_is_in_view(
    many: Run, page: Page, asked: list[str]
) -> None:
    """Every metric has a panel; visible ones are plotted with few requests."""
    expect(page.locator("[data-metric-count]")).to_have_text("2,000 metrics")
    assert page.evaluate(PANELS) == NAMES
    expect(page.locator(".panel-group[data-group='layer39/'] summary")).to_have_text(
        "layer3950 panels"
    )
    for name in (NAMES[-1], NAMES[1000], NAMES[0], NAMES[-1]):
        at_panel(page, name)
        assert page.evaluate(PLOTS) < 40
    assert len(asked) < 20
    assert max(address.count("metric=") for address in asked) < 40
    traces = page.evaluate("(row) => document.querySelector(row).data.map(({name}) => name)", PLOT)
    assert NAMES[-1] in traces


ROWS = "(plots) => plots.map((plot) => [plot.closest('[data-row]').dataset.row, plot.dataset.plot])"
PLOT = f"[data-plot='{NAMES[-1]}']"


def test_numbers_in_names_are_in_order(database: Database, running: Run, page: Page) -> None:
    """Panels and table sort numbers in names by value; of many panels only the first groups are
    open.
    """
    names = [f"layer{n}/{each}" for n in range(12) for each in ("max", "mean", *"abcdefgh")]
    log(database, running, 1, names[::-1])
    log(database, running, 2, names[::-1])
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    ordered = [f"layer{n}/{each}" for n in range(12) for each in (*"abcdefgh", "max", "mean")]
    assert page.evaluate(PANELS) == ordered
    rows = page.get_by_role("region", name="Table of metrics").locator("tbody tr td:first-child")
    assert rows.all_inner_texts() == ordered[:MOST_SHOWN]
    expect(page.locator(".panel-group[open]")).to_have_count(6)
    page.locator("[data-group='layer11/'] summary").click()
    expect(page.locator(".panel-group[open]")).to_have_count(7)
    log(database, running, 3, ["layer7/new"])
    wait_until(page, f"({PANELS})().includes('layer7/new')")
    expect(page.locator(".panel-group[open]")).to_have_count(7)
    page.get_by_role("searchbox", name="Search metrics by name").press_sequentially("layer7/m")
    expect(page.locator(".panel-group[open]")).to_have_count(1)
    expect(rows).to_have_text(["layer7/max", "layer7/mean"])


def test_a_metric_in_view_is_live(database: Database, many: Run, page: Page) -> None:
    """A new value appears in a visible panel, or once its panel is visible."""
    at_panel(page, NAMES[-1])
    value = page.locator(f"[data-row='{NAMES[-1]}'] .panel-lines b")
    expect(value).to_have_text("-0.0002469")
    for step in (3, 4):
        log(database, many, step)
    expect(value).to_have_text("-0.0004938")
    at_panel(page, NAMES[0])
    expect(page.locator(f"[data-row='{NAMES[0]}'] .panel-lines b")).to_have_text("-0.0004938")
    assert page.evaluate(LAST_STEPS) == [4]
    log(database, many, 5, ["layer00/unit00/new"])
    wait_until(page, f"({PANELS})().includes('layer00/unit00/new')")
    expect(page.locator("[data-metric-count]")).to_have_text("2,001 metrics")


def test_a_search_filters_panels_and_table(
    database: Database, ada: User, many: Run, page: Page
) -> None:
    """A search filters panels while typing and by URL; pinned metrics are always shown.

    The table has pages, and the rows of the shown one are live.
    """
    search = page.get_by_role("searchbox", name="Search metrics by name")
    search.press_sequentially("UNIT07")
    expect(page.locator("[data-metric-count]")).to_have_text("40 of 2,000 metrics")
    search.fill("layer7/nothing")
    expect(page.locator("[data-metric-count]")).to_have_text("0 of 2,000 metrics")
    expect(page.locator("[data-metric-table]")).to_contain_text("Search for a part of a name.")
    search.fill("UNIT07")
    found = [name for name in NAMES if "unit07" in name]
    assert page.evaluate(PANELS) == found
    at_panel(page, found[-1])
    rows = page.get_by_role("region", name="Table of metrics").locator("tbody tr")
    page.locator("#metrics").scroll_into_view_if_needed()
    expect(rows).to_have_count(len(found))
    with database.writing() as session:
        pinned = {"pinned": [NAMES[3]], "order": [], "collapsed": []}
        chart_preferences.write(session, ada, f"panels:{many.recipe}", pinned)
    page.reload()
    wait_until(page, f"(names) => String(({PANELS})()) === String(names)", [NAMES[3], *found])
    expect(search).to_have_value("UNIT07")
    log(database, many, 3)
    page.locator("#metrics").scroll_into_view_if_needed()
    expect(rows.last).to_contain_text("-0.0003703")
    expect(rows).to_have_count(len(found))
    search.fill("")
    expect(page.locator("[data-metric-count]")).to_have_text("2,000 metrics")
    assert len(page.evaluate(PANELS)) == MANY
    page.locator("#metrics").scroll_into_view_if_needed()
    expect(rows).to_have_count(MOST_SHOWN)
    log(database, many, 4)
    expect(rows.last).to_contain_text("-0.0004938")
    table = page.locator("[data-metric-table]")
    table.get_by_role("link", name="Next").click()
    expect(table).to_contain_text("101–200 of 2,000 metrics")
    expect(rows.first).to_contain_text(NAMES[100])
    log(database, many, 5)
    expect(rows.first).to_contain_text("-0.0006172")
    table.get_by_role("link", name="Previous").click()
    expect(rows.first).to_contain_text(NAMES[0])


def test_folded_sections_request_nothing(many: Run, page: Page, asked: list[str]) -> None:
    """One button folds and unfolds all sections, as the server stores; a search opens matches."""
    with page.expect_response("**/preferences/panels"):
        page.get_by_role("button", name="Fold all").click()
    expect(page.locator(".panel-group[open]")).to_have_count(0)
    page.reload()
    page.wait_for_selector("[data-drawn]")
    expect(page.locator(".panel-group")).not_to_have_count(0)
    asked.clear()
    page.get_by_role("link", name="Table").click()
    expect(page.get_by_role("region", name="Table of metrics")).to_be_in_viewport()
    assert asked == []
    search = page.get_by_role("searchbox", name="Search metrics by name")
    search.fill("layer07/unit07")
    page.wait_for_selector("[data-plot='layer07/unit07'][data-drawn]")
    search.fill("")
    expect(page.locator(".panel-group[open]")).to_have_count(0)
    page.get_by_role("button", name="Unfold all").click()
    at_panel(page, NAMES[0])


@pytest.mark.parametrize("width", [390, 1280, 1700])
def test_no_value_in_a_panel_is_cut(many: Run, page: Page, width: int) -> None:
    """In a panel names are shortened instead of values."""
    page.set_viewport_size({"width": width, "height": 900})
    at_panel(page, NAMES[0])
    assert page.evaluate(CUT) == []
    page.locator("[data-smooth]").evaluate("""(output) => {
        const input = output.closest('label').querySelector('input')
        input.value = 0.5
        input.dispatchEvent(new Event('input', { bubbles: true }))
    }""")
    expect(page.locator(f"[data-row='{NAMES[0]}'] .panel-lines b")).to_have_count(2)
    assert page.evaluate(CUT) == []


def test_a_panel_that_was_moved_resized_and_zoomed_stays_so_out_of_view(
    many: Run, page: Page
) -> None:
    """A panel keeps position, size and zoom while it is out of view."""
    first = page.locator(f"[data-row='{NAMES[0]}']")
    at_panel(page, NAMES[0])
    first.locator("[data-move]").press("ArrowRight")
    first.locator("[data-resize]").press("ArrowDown")
    expect(first.locator("[data-move]")).to_have_attribute(
        "aria-label", f"Move {NAMES[0]}: 2 of 50"
    )
    expect(first).to_have_attribute("style", "--height: 190px;")
    first.locator("[data-more]").click()
    page.get_by_role("button", name="Pin to the top").click()
    expect(page.locator(".panel-group[data-group=pinned] h3")).to_have_text(NAMES[0])
    page.get_by_role("button", name="Fold all", exact=True).click()  # not what is pinned
    expect(page.locator(".panel-group[open]")).to_have_count(1)
    expect(page.locator(".panel-group[data-group=pinned]")).to_have_attribute("open", "")
    page.get_by_role("button", name="Unfold all").click()
    page.evaluate("document.activeElement.blur()")
    at_panel(page, NAMES[-1])
    at_panel(page, NAMES[0])
    expect(first).to_have_attribute("style", "--height: 190px;")
    assert first.locator(".panel-lines .value").get_attribute("title") == NAMES[0]
    rows = page.locator("[data-plot]").evaluate_all(ROWS)
    assert rows == [[row, row] for row, _ in rows]


def test_only_the_first_of_many_panels_are_open(
    database: Database, running: Run, page: Page
) -> None:
    """Groups of more than 60 panels in all, or 30 on a phone, are folded; tabs fade at the
    phone's edge.
    """
    log(database, running, 1, [f"{group}/{n}" for group in "abc" for n in range(40)])
    for width, opened in ((1440, ["gradients", "a/"]), (390, ["gradients"])):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/runs/1")
        page.wait_for_selector("[data-drawn]")
        groups = page.locator(".panel-group[data-group$='/'], .panel-group[data-group=gradients]")
        expect(groups).to_have_count(4)
        shown = groups.evaluate_all(
            "all => all.filter(({ open }) => open).map(({ dataset }) => dataset.group)"
        )
        assert shown == opened
    expect(page.locator(".tabs").first).to_have_css("mask-image", re.compile("gradient"))
