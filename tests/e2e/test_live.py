"""All parts of a live run's page show the same moment."""

from typing import Any

from playwright.sync_api import Page, Route, expect

from db.database import Database
from db.tables import Run
from db.telemetry import telemetry
from tests.db.telemetry.telemetry_made import make_events, make_steps, record, step_event

SAMPLES, MOMENTS = 100, 5
BATCH = 20
#: The last step of each visible panel, as plotly draws it, of the tiles, and of the scaler's card;
#: and the last skipped step of panels, card and table.
SHOWN = """() => {
    const number = (selector) => {
        const text = document.querySelector(selector)?.textContent ?? ''
        return Number(text.replace('step ', '').replaceAll(',', ''))
    }
    const plots = [...document.querySelectorAll('[data-plot]')].filter((plot) => {
        const { top, bottom } = plot.getBoundingClientRect()
        return bottom > 0 && top < innerHeight
    })
    const isLine = ({ mode, yaxis }) => yaxis === 'y2' && mode !== 'none'
    const lines = plots.flatMap((plot) => plot.data.filter(isLine))
    const skips = plots.map((plot) => plot.data.find(({ name }) => name === 'skipped'))
    return {
        panels: plots.map((plot) => plot.dataset.plot),
        steps: [
            ...lines.map(({ x }) => x.at(-1)),
            ...plots.map((plot) => plot._fullLayout.xaxis.range[1]),
            number('[data-fact=step]'),
            number('.facts .fact:nth-child(2) .below'),
            number('[data-fragment=scaler_figures] header span'),
        ],
        skipped: [
            ...skips.map(({ x }) => x.at(-1)),
            number('.skip-list .number'),
            number('.skips tbody [data-called=step]'),
        ],
    }
}"""


def test_all_parts_of_a_slow_page_show_the_same_step(
    database: Database, running: Run, page: Page
) -> None:
    """In 100 samples of a live run panels, tiles, card and table show the same step."""
    made = 0

    def train() -> None:
        nonlocal made
        first, made = made + 1, made + BATCH
        steps = make_steps([2.0 / first] * BATCH, first=first, skipped=[first + 3])
        events = list(map(step_event, make_events([first + 3])))
        with database.writing() as session:
            flush = telemetry.Flush(steps=[steps], events=events)
            telemetry.record(session, running.id, running.attempt, flush)

    train()
    page.set_viewport_size({"width": 1280, "height": 1800})
    page.goto("/runs/1")
    for panel in ("loss", "scale", "norm", "data", "lr"):
        page.wait_for_selector(f"[data-plot={panel}][data-drawn]")
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": 6})
    samples: list[dict[str, Any]] = []
    while len(samples) < SAMPLES or len({sample["steps"][0] for sample in samples}) < MOMENTS:
        train()
        samples.append(page.evaluate(SHOWN))
    assert samples[0]["panels"] == ["loss", "scale", "norm", "data", "lr"]
    apart = [sample for sample in samples if len({*sample["steps"]}) > 1]
    assert apart == []
    apart = [sample for sample in samples if len({*sample["skipped"]}) > 1]
    assert apart == []


def test_the_servers_charts_are_live_until_plotly_is_there(
    database: Database, running: Run, page: Page
) -> None:
    """The server's charts are updated with the tiles until Plotly's figures replace them."""
    held: list[Route] = []
    page.route("**/plotly*", lambda route: held.append(route))
    record(database, running, make_steps([2.0] * 10))
    page.goto("/runs/1")
    before = page.inner_html("[data-plot=loss] svg.lines")
    record(database, running, make_steps([0.5] * 30, first=11))
    expect(page.locator("[data-fact=step]")).to_have_text("40")
    assert page.inner_text("[data-last=loss]") == "0.5"
    assert page.locator("[data-plot=scale] .x span").last.inner_text() == "40"
    assert page.inner_html("[data-plot=loss] svg.lines") != before
    for route in held:
        route.continue_()
    for panel in ("loss", "scale"):
        page.wait_for_selector(f"[data-plot={panel}][data-drawn='40']")
    expect(page.locator("[data-static-chart]")).to_have_count(0)
    record(database, running, make_steps([0.25] * 10, first=41))
    page.wait_for_selector("[data-plot=loss][data-drawn='50']")
    assert page.locator("[data-row=loss] .panel-lines b").first.inner_text() == "0.25"


def test_a_page_opened_before_the_first_step_has_charts_without_plotly(
    database: Database, running: Run, page: Page
) -> None:
    """The server's charts appear with the first steps, and Plotly's figures replace them."""
    held: list[Route] = []
    page.route("**/plotly*", lambda route: held.append(route))
    page.goto("/runs/1")
    expect(page.locator("[data-starting]")).to_be_visible()
    record(database, running, make_steps([2.0] * 10))
    for panel in ("loss", "scale"):
        label = page.locator(f"[data-plot={panel}] .x span").last
        expect(label).to_have_text("10")
    assert page.inner_text("[data-last=loss]") == "2"
    for route in held:
        route.continue_()
    for panel in ("loss", "scale"):
        page.wait_for_selector(f"[data-plot={panel}][data-drawn='10']")
    expect(page.locator("[data-static-chart]")).to_have_count(0)
