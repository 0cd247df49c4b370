"""Opening a run of 10,000,000 steps in Chromium, compared with 10,000: time to the first chart.

The time is from the navigation to the drawn figure, with the scripts and the server's caches warm.
"""

import statistics
import tempfile
import time

from playwright.sync_api import Page, sync_playwright

from benchmarks import synthetic
from benchmarks.following import VIEWPORT
from benchmarks.report import report
from benchmarks.site import serving_from
from tests.browser import launch

ROUNDS = 9
BAR = 2.0


def open_page(page: Page, address: str) -> float:
    """Return the milliseconds to the first chart."""
    started = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector("[data-drawn]")
    return (time.perf_counter() - started) * 1000


def main() -> None:
    """Open both runs in turn."""
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder,
        serving_from(synthetic.long_run(), folder, synthetic.LONG_STEPS) as site,
        sync_playwright() as playwright,
    ):
        browser = launch(playwright)
        page = browser.new_page(viewport=VIEWPORT)
        page.goto(site.link())
        page.get_by_role("button", name="Sign in").click()
        addresses = {run_id: f"{site.address}/runs/{run_id}" for run_id in (1, 2)}
        cells = {}
        for run_id, address in addresses.items():
            open_page(page, address)
            cells[run_id] = [
                (page.text_content(f"[data-{what}-count]") or "").partition(" skipped")[0]
                for what in ("point", "skip")
            ]
        rounds = [[open_page(page, each) for each in addresses.values()] for _ in range(ROUNDS)]
        browser.close()
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    ratio = medians[0] / medians[1]
    rows = [
        (*cells[run_id], f"{median:.0f}") for run_id, median in zip(cells, medians, strict=True)
    ]
    report(
        "opening_page",
        f"ratio ≤ {BAR:g}",
        ("points", "skipped steps", f"ms, median of {ROUNDS}"),
        [*rows, ("ratio", "", f"{ratio:.2f}")],
        measured=f"{ratio:.2f}",
        passed=ratio <= BAR,
    )


if __name__ == "__main__":
    main()
