"""A page in Chromium that follows run 1 of a site, and says what it drew when."""

import json
import time
from dataclasses import dataclass

from playwright.sync_api import ViewportSize, sync_playwright

from benchmarks.site import Site
from tests.browser import launched

#: As in tests/e2e: the system's own browser, drawing without a GPU.
VIEWPORT: ViewportSize = {"width": 1280, "height": 1400}  # all rows at once
WARM_SECONDS = 10.0

#: Keeps, each time that a frame was drawn, the moment and the last step in the figure.
OBSERVE = """() => {
    const plot = document.querySelector('[data-plot]')
    window.frames_drawn = []
    plot.on('plotly_afterplot', () => requestAnimationFrame(() => {
        const x = plot.data.find((trace) => trace.name === 'loss').x
        window.frames_drawn.push([Date.now(), x[x.length - 1]])
    }))
}"""


@dataclass(frozen=True)
class Followed:
    """frames: (milliseconds since the epoch, last step drawn).

    busy, processor: share of the time in which the main thread had something to do, and in which it
    did it; on a machine that others use too it waits in between.
    """

    frames: list[tuple[float, int]]
    busy: float
    processor: float
    points: int


def follow(site: Site, seconds: float) -> Followed:
    """Open the page, let it settle, and watch it."""
    with sync_playwright() as playwright:
        browser = launched(playwright)
        page = browser.new_page(viewport=VIEWPORT)
        page.goto(site.link())
        page.get_by_role("button", name="Sign in").click()
        page.goto(f"{site.address}/runs/1")
        page.wait_for_selector("[data-drawn]")
        page.locator("#charts").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('[data-plot]').scrollIntoView()")
        page.wait_for_timeout(WARM_SECONDS * 1000)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def spent() -> tuple[float, float]:
            metrics = session.send("Performance.getMetrics")["metrics"]
            seconds = {metric["name"]: metric["value"] for metric in metrics}
            return seconds["TaskDuration"], seconds["ThreadTime"]

        page.evaluate(OBSERVE)
        before, started = spent(), time.perf_counter()
        page.wait_for_timeout(seconds * 1000)
        lasted = time.perf_counter() - started
        busy, processor = ((b - a) / lasted for a, b in zip(before, spent(), strict=True))
        frames = json.loads(page.evaluate("JSON.stringify(window.frames_drawn)"))
        points = int(page.get_attribute("[data-plot]", "data-drawn") or 0)
        browser.close()
    return Followed([(moment, step) for moment, step in frames], busy, processor, points)
