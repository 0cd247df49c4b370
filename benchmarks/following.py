"""A page in Chromium that follows run 1 of a site, with the times of its drawings."""

import json
import time
from dataclasses import dataclass

from playwright.sync_api import ViewportSize, sync_playwright

from benchmarks.site import Site
from tests.browser import launch

#: As in tests/e2e: the system's own browser, drawing without a GPU.
VIEWPORT: ViewportSize = {"width": 1280, "height": 1400}  # all rows at once
WARM_SECONDS = 10.0

#: Keeps, each time that something was drawn, the moment, the step of the tile and the last step of
#: each panel; and the duration of each long task.
OBSERVE = """() => {
    const plots = [...document.querySelectorAll('[data-plot]')]
        .filter((plot) => plot.data && plot.getBoundingClientRect().top < innerHeight)
    const numberIn = (element) => Number(element.textContent.replaceAll(',', ''))
    const lastOf = (plot) => plot.data.find(({ mode }) => mode !== 'none').x.at(-1)
    window.frames_drawn = []
    window.long_tasks = []
    let asked = 0
    const note = () => {
        asked ||= requestAnimationFrame(() => {
            asked = 0
            const tile = numberIn(document.querySelector('[data-fact=step]'))
            window.frames_drawn.push([Date.now(), tile, ...plots.map(lastOf)])
        })
    }
    for (const plot of plots) plot.on('plotly_afterplot', note)
    const facts = document.querySelector('[data-fragment=facts]')
    const changes = { childList: true, subtree: true, characterData: true }
    new MutationObserver(note).observe(facts, changes)
    new PerformanceObserver((list) => {
        for (const { duration } of list.getEntries()) window.long_tasks.push(duration)
    }).observe({ type: 'longtask' })
}"""


@dataclass(frozen=True)
class Frame:
    """The page's state from a time on, in milliseconds since the epoch."""

    moment: float
    tile: int
    panels: tuple[int, ...]  # the last step of each

    @property
    def spread(self) -> int:
        """Return the difference in steps between the parts of the page."""
        return max(self.tile, *self.panels) - min(self.tile, *self.panels)


@dataclass(frozen=True)
class Followed:
    """Measurements of a page.

    busy: share of the time in which the main thread had a task.  processor: share of the time in
    which it ran; on a machine with other users it waits in between.  longest: its longest task in
    milliseconds.
    """

    frames: list[Frame]
    busy: float
    processor: float
    points: int
    longest: float


def follow(site: Site, seconds: float, *, throttling: float = 1) -> Followed:
    """Open the page, wait until it settles, and follow it.

    throttling: the factor by which the page's processor is slower than this machine's.
    """
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport=VIEWPORT)
        page.goto(site.link())
        page.get_by_role("button", name="Sign in").click()
        session = page.context.new_cdp_session(page)
        session.send("Emulation.setCPUThrottlingRate", {"rate": throttling})
        page.goto(f"{site.address}/runs/1")
        page.wait_for_selector("[data-drawn]", timeout=120_000)
        page.locator("#charts").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('[data-plot]').scrollIntoView()")
        page.wait_for_timeout(WARM_SECONDS * 1000)
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
        tasks = json.loads(page.evaluate("JSON.stringify(window.long_tasks)"))
        points = int(page.get_attribute("[data-plot]", "data-drawn") or 0)
        browser.close()
    drawn = [Frame(moment, tile, tuple(panels)) for moment, tile, *panels in frames]
    return Followed(drawn, busy, processor, points, max(tasks, default=0.0))
