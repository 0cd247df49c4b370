"""Y axes of panels, logarithmic or without outliers, which the server remembers."""

import re

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from db.access import chart_preferences
from db.database import Database
from db.tables import Run, User
from tests.app.conftest import start_run
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.site import until

NOT_SHOWN = re.compile("values above .* not shown$")
LOSSES = [1.0 + 0.01 * (step % 10) for step in range(100)]


def _axis(page: Page, row: str) -> str:
    page.wait_for_selector(f"[data-plot={row}][data-drawn]")
    kind: str = page.evaluate(
        f"document.querySelector('[data-plot={row}]')._fullLayout.yaxis2.type"
    )
    return kind


def _choose(page: Page, row: str, label: str) -> None:
    page.locator(f"[data-row={row}] [data-more]").click()
    page.locator("[data-panel-menu]").get_by_role("button", name=label, exact=True).click()


@pytest.fixture
def two(database: Database, ada: User, running: Run) -> None:
    """A run of digits and one of another recipe."""
    record(database, running, make_steps(LOSSES))
    other = start_run(database, ada)
    record(database, other, make_steps(LOSSES))
    with database.writing() as session:
        session.execute(update(Run).where(Run.id == other.id).values(recipe="gpt"))


def test_a_log_axis_is_of_its_panel(two: None, page: Page) -> None:
    """A log axis set by menu or shortcut applies to one panel, in all runs of the recipe."""
    page.goto("/runs/1")
    assert _axis(page, "loss") == "linear"
    log, linear = (page.locator(f"[data-view=loss][value={name}]") for name in ("log", "linear"))
    with page.expect_response("**/preferences/panels"):
        _choose(page, "loss", "Log axis")
    expect(log).to_be_checked()
    page.wait_for_url("**/runs/1?ylog=loss")
    page.goto("/runs/2")
    assert _axis(page, "loss") == "linear"
    expect(linear).to_be_checked()
    page.goto("/runs/1")
    expect(log).to_be_checked()
    assert _axis(page, "loss") == "log"
    with page.expect_response("**/preferences/panels"):
        linear.check(force=True)
    page.wait_for_url("**/runs/1")
    page.goto("/runs/1")
    assert _axis(page, "loss") == "linear"
    page.goto("/runs/1?loss=log")  # of an earlier version
    expect(log).to_be_checked()
    assert _axis(page, "loss") == "log"


def test_a_log_axis_for_all_runs_stays_until_it_is_changed(
    database: Database, ada: User, two: None, page: Page
) -> None:
    """An earlier version's log axis applies to each recipe until that is arranged."""
    with database.writing() as session:
        old = {"x": "step", "loss": "log", "smooth": 0.0}
        chart_preferences.write(session, ada, "toolbar", old)
    page.goto("/runs/1")
    assert _axis(page, "loss") == "log"
    with page.expect_response("**/preferences/panels"):
        _choose(page, "loss", "Linear axis")
    with page.expect_response("**/preferences/toolbar"):
        page.get_by_role("radio", name="Time", exact=True).check(force=True)
    page.goto("/runs/1")
    assert _axis(page, "loss") == "linear"
    for address in ("/runs/2", "/compare?runs=1,2"):
        page.goto(address)
        assert _axis(page, "loss") == "log"


def test_comparisons_remember_a_log_axis(two: None, page: Page) -> None:
    """Comparisons and the list's charts share a log axis, but a run's page does not."""
    page.goto("/compare?runs=1,2")
    assert _axis(page, "loss") == "linear"
    with page.expect_response("**/preferences/panels"):
        _choose(page, "loss", "Log axis")
    page.wait_for_url(re.compile("ylog=loss"))
    for address, kind in (
        ("/compare?runs=2", "log"),
        ("/runs?view=charts", "log"),
        ("/runs/1", "linear"),
    ):
        page.goto(address)
        page.wait_for_selector("[data-row=loss] .main-svg")
        found = "document.querySelector('[data-row=loss] .plot')._fullLayout.yaxis2?.type"
        until(lambda found=found: page.evaluate(found) is not None)  # of the first points
        assert page.evaluate(found) == kind, address


def test_a_panel_ignores_outliers(database: Database, running: Run, page: Page) -> None:
    """A panel that ignores outliers has the range of other values, live and after a reload."""
    record(database, running, make_steps([*LOSSES[:50], 500.0, *LOSSES[50:]]))
    page.goto("/runs/1")
    _axis(page, "loss")
    top = "document.querySelector('[data-plot=loss]')._fullLayout.yaxis2.range[1]"
    assert page.evaluate(top) > 500
    with page.expect_response("**/preferences/panels"):
        _choose(page, "loss", "Ignore outliers")
    sign = page.locator("[data-row=loss] .sign", has_text=NOT_SHOWN)
    expect(sign).to_be_visible()
    assert page.evaluate(top) < 2
    page.wait_for_url("**/runs/1?ytrim=loss")
    page.goto("/runs/1")
    expect(sign).to_be_visible()
    assert page.evaluate(top) < 2
    record(database, running, make_steps([3.0] * 100, first=102))
    until(lambda: 3 < page.evaluate(top) < 6)
    with page.expect_response("**/preferences/panels"):
        _choose(page, "loss", "Show outliers")
    expect(sign).to_have_count(0)
    until(lambda: page.evaluate(top) > 500)
    page.goto("/compare?runs=1&draw=loss")
    _axis(page, "loss")
    _choose(page, "loss", "Ignore outliers")
    expect(page.locator("[data-row=loss] [data-pointed]")).to_have_text(NOT_SHOWN)
    until(lambda: page.evaluate(top) < 6)
