"""A run with many metric names in a real browser: charts and table draw a page of them."""

from playwright.sync_api import Page, expect

from app.telemetry.metric_names import MOST_SHOWN
from db.access import chart_preferences
from db.database import Database
from db.tables import Run, User
from tests.browser import LINES, wait_until
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record

NAMES = [f"layer{number:03d}/norm" for number in range(150)]
PANELS = """() => [...document.querySelectorAll('.chart-panel h3')].map((each) => each.textContent)
    .filter((name) => name.startsWith('layer'))"""


def log(database: Database, run: Run, step: int) -> None:
    events = [make_metric(step, step / 8, name) for name in NAMES]
    record(database, run, make_steps([1.0], first=step), events=events)


def test_a_search_finds_metrics_and_the_charts_draw_them(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """The URL contains the search, and live updates respect it; pinned metrics are always drawn."""
    log(database, running, 1)
    page.goto("/runs/1")
    page.wait_for_selector("[data-drawn]")
    assert page.evaluate(PANELS) == NAMES[:MOST_SHOWN]
    page.locator("[data-menu] > summary").click()
    page.get_by_role("link", name=f"{MOST_SHOWN} of {len(NAMES)} metrics").click()
    search = page.get_by_role("searchbox", name="Search metrics by name")
    search.fill("LAYER14")
    search.press("Enter")
    rows = page.get_by_role("region", name="Table of metrics").locator("tbody tr")
    expect(rows).to_have_count(10)
    with database.writing() as session:
        pinned = {"pinned": [NAMES[3]], "order": [], "collapsed": []}
        chart_preferences.write(session, ada, f"panels:{running.recipe}", pinned)
    page.reload()
    page.wait_for_selector("[data-drawn]")
    shown = [NAMES[3], *NAMES[140:]]
    assert page.evaluate(PANELS) == shown
    log(database, running, 2)
    wait_until(
        page,
        f"() => {LINES}.every((trace) => !trace.name.startsWith('layer') || trace.x.length === 2)",
    )
    assert page.evaluate(PANELS) == shown
    expect(rows.first).to_contain_text("0.25")
    expect(rows).to_have_count(len(shown))
    page.get_by_role("link", name="All metrics").click()
    expect(rows).to_have_count(MOST_SHOWN)
    page.get_by_role("link", name="Next").click()
    expect(rows).to_have_count(len(NAMES) - MOST_SHOWN)
