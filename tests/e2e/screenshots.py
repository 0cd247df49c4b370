"""Take the README's pictures from the running product: `make screenshots`."""

import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import launched
from tests.site import up

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATIENCE = 120_000  # milliseconds
RUNS = (("fp32", "400"), ("bf16", "400"), ("fp16", "2000"))


def main() -> None:
    """Submit a run in each precision, wait for them, and take the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        up(HALFSTEP_DATA=data) as (_process, link),
        sync_playwright() as playwright,
    ):
        browser = launched(playwright)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        expect.set_options(timeout=PATIENCE)
        page.set_default_timeout(PATIENCE)
        page.goto(link)
        page.get_by_role("button", name="Sign in").click()
        while not page.get_by_text("A worker is up").is_visible():
            page.reload()
        for precision, steps in RUNS:
            submit(page, precision, steps)
        expect(page.locator(".facts .status")).to_have_text("finished")
        page.reload()
        page.wait_for_selector("[data-drawn]")
        page.screenshot(path=IMAGES / "run.png")
        page.goto(link.split("/?")[0] + "/runs")
        page.screenshot(
            path=IMAGES / "runs.png", clip={"x": 0, "y": 0, "width": 1280, "height": 380}
        )
        browser.close()


def submit(page: Page, precision: str, steps: str) -> None:
    page.get_by_role("link", name="New run").first.click()
    page.get_by_role("link", name="Handwritten digits").click()
    page.locator(f"[name=precision][value={precision}]").check(force=True)
    page.locator('[name="training.steps"]').fill(steps)
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/*")


if __name__ == "__main__":
    main()
