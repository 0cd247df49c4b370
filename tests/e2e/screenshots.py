"""Take the documents' pictures from the running product: `make screenshots`, or by name:
`python -m tests.e2e.screenshots comparison`.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import STATUS, launched, open_menu
from tests.site import up

THEMES = MappingProxyType({"light": "", "dark": "-dark"})
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATIENCE = 120_000  # milliseconds
MOST_BYTES = 200_000  # of a picture: a clone of the repository brings all of them
#: Every chart that is in view is drawn.
DRAWN = """() => [...document.querySelectorAll('.chart-panel .plot')]
    .filter((plot) => plot.getBoundingClientRect().top < innerHeight)
    .every((plot) => plot.dataset.drawn)"""
PICTURES = ("run", "runs", "comparison")
RUNS = (("fp32", "400"), ("bf16", "400"), ("fp16", "2000"))


def main(wanted: list[str]) -> None:
    """Submit a run in each precision, wait for them, and take the requested screenshots."""
    if unknown := set(wanted) - {*PICTURES}:
        sys.exit(f"{', '.join(unknown)}: allowed are {', '.join(PICTURES)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        up(HALFSTEP_DATA=data) as (_process, link),
        sync_playwright() as playwright,
    ):
        browser = launched(playwright)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        expect.set_options(timeout=PATIENCE)
        page.set_default_timeout(PATIENCE)
        page.goto(link)
        page.get_by_role("button", name="Sign in").click()
        while not page.get_by_text("Worker ready").is_visible():
            page.reload()
        for precision, steps in RUNS if wanted != ["comparison"] else RUNS[:1]:
            submit(page, precision, steps)
        expect(page.locator(STATUS)).to_have_text("Finished")
        if "run" in wanted:
            take(page, "run", 900)
        if "runs" in wanted:
            page.goto(link.split("/?")[0] + "/runs")
            take(page, "runs", 380)
        if "comparison" in wanted:
            compare(page, link.split("/?")[0])
        browser.close()


def compare(page: Page, address: str) -> None:
    """Queue the first run in every precision, and take their comparison once they have ended."""
    page.goto(f"{address}/runs/1")
    open_menu(page)
    page.get_by_text("Run in other precisions…").click()
    page.get_by_role("button", name="Queue 4 runs").click()
    page.wait_for_url("**/groups/*")
    expect(page.locator('td [data-status="finished"]')).to_have_count(4)
    page.set_viewport_size({"width": 1440, "height": 1400})
    take(page, "comparison", 1150, themes={"light": ""})


def take(page: Page, name: str, height: int, themes: Mapping[str, str] = THEMES) -> None:
    """Take a picture of the top of a page, in each theme."""
    for theme, suffix in themes.items():
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.reload()
        if name != "runs":
            page.wait_for_function(DRAWN)
        path = IMAGES / f"{name}{suffix}.png"
        page.screenshot(
            path=path, full_page=True, clip={"x": 0, "y": 0, "width": 1440, "height": height}
        )
        size = path.stat().st_size
        assert size <= MOST_BYTES, f"{path} has {size} bytes; allowed: {MOST_BYTES}"


def submit(page: Page, precision: str, steps: str) -> None:
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="New run").first.click()
    page.get_by_role("link", name="Handwritten digits").click()
    page.locator(f"[name=precision][value={precision}]").check(force=True)
    page.locator('[name="training.steps"]').fill(steps)
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/*")


if __name__ == "__main__":
    main(sys.argv[1:] or [*PICTURES])
