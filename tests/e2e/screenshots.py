"""Take the README's pictures from the running product: `make screenshots`."""

import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import launched
from tests.site import up

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATIENCE = 120_000  # milliseconds
MOST_BYTES = 200_000  # of a picture: a clone of the repository brings all of them
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
        while not page.get_by_text("A worker is up, and trains").is_visible():
            page.reload()
        for precision, steps in RUNS:
            submit(page, precision, steps)
        expect(page.locator(".facts .status")).to_have_text("finished")
        take(page, "run", 900)
        page.goto(link.split("/?")[0] + "/runs")
        take(page, "runs", 380)
        browser.close()


def take(page: Page, name: str, height: int) -> None:
    """Take a picture of the top of a page, in both themes."""
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.reload()
        if name == "run":
            page.wait_for_selector("[data-drawn]")
        path = IMAGES / f"{name}{suffix}.png"
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1280, "height": height})
        size = path.stat().st_size
        assert size <= MOST_BYTES, f"{path} has {size} bytes; allowed: {MOST_BYTES}"


def submit(page: Page, precision: str, steps: str) -> None:
    page.get_by_role("link", name="New run").first.click()
    page.get_by_role("link", name="Handwritten digits").click()
    page.locator(f"[name=precision][value={precision}]").check(force=True)
    page.locator('[name="training.steps"]').fill(steps)
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/*")


if __name__ == "__main__":
    main()
