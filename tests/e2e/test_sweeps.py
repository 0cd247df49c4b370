"""A sweep end to end, with a real browser, server, worker and training."""

import re

import pytest
from playwright.sync_api import Page, expect

from db.settings import Settings
from tests.site import Site, until

PATIENCE = 90_000  # milliseconds, for a slow machine


@pytest.fixture
def settings(site: Site) -> Settings:
    """Settings with the worker's data folder and database."""
    return Settings(data=site.data, database_url=site.url)


def test_three_learning_rates_are_tried(site: Site, page: Page) -> None:
    """A user types three learning rates into a run's form and confirms once; the sweep runs to
    its end with values, charts, and a link from the best run to the comparison.
    """
    with site.worker():
        until(lambda: site.offers("digits"))
        page.goto("/runs/new?recipe=digits")
        # The scale is searched for in the first few, and a run that applies nothing has no value.
        page.locator('[name="training.steps"]').fill("25")
        page.get_by_role("link", name="Sweep", exact=True).click()
        page.wait_for_url("**/sweeps/new?recipe=digits")
        expect(page.locator('[name="training.steps"]')).to_have_value("25")
        page.locator('[name="recipe.learning_rate"]').fill("0.3, 0.03, 0.003")
        page.get_by_label("Metric").fill("val/accuracy")
        page.get_by_role("button", name="Preview sweep").click()
        expect(page.get_by_role("button", name="Queue 3 runs")).to_be_visible()
        page.get_by_role("link", name="Runs", exact=True).first.click()
        page.go_back()  # not to a question whether to send the form again
        expect(page.locator('[name="recipe.learning_rate"]')).to_have_value("0.3, 0.03, 0.003")
        page.get_by_role("button", name="Preview sweep").click()
        page.get_by_role("button", name="Queue 3 runs").click()
        page.wait_for_url("**/sweeps/1")
        progress = page.locator("[data-ended]")
        expect(progress).to_contain_text("3 of 3", timeout=PATIENCE)
        expect(page.locator(".pill .status")).to_have_text("Finished")
        expect(page.locator("[data-fragment=trial_count]")).to_have_text("3")
        expect(page.locator(".bar progress")).to_have_class("good")
        page.wait_for_selector('[data-trials-plot][data-drawn="3"]')
        page.locator("[data-parallel-plot]").scroll_into_view_if_needed()
        page.wait_for_selector('[data-parallel-plot][data-drawn="3"]')
        page.wait_for_selector('[data-setting-plot][data-drawn="3"]')
    _check_layout(page)
    expect(page.locator("tr[data-key]")).to_have_count(3)
    expect(page.locator("tr[data-best=true]")).to_have_count(1)
    expect(page.locator("tr[data-key='3'] .name")).to_contain_text("learning_rate=0.003")
    page.get_by_role("link", name="Compare best 3").click()
    expect(page.locator("h1")).to_have_text("Compare 3 runs")
    page.goto("/audit")  # to count is to change nothing
    audit_events = page.locator("tbody tr", has_text="/sweeps")
    expect(audit_events).to_have_count(1)
    expect(audit_events).to_contain_text("sweep 1 of 3 runs, recipe digits")


def _check_layout(page: Page) -> None:
    """Tiles, banner and charts are in the first screen, the best trials come first, and no page
    scrolls sideways.
    """
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("scrollTo(0, 0)")
    panels = [panel.bounding_box() for panel in page.locator(".chart-panel").all()]
    assert len(panels) == 3
    assert all(box["y"] + box["height"] <= 690 for box in panels if box)
    expect(page.locator(".fact dt")).to_have_text(
        [
            re.compile("Runs ended"),
            "Time per run",
            "Best val/accuracy",
            "Best learning_rate",
            "Runs without a value",
        ]
    )
    expect(page.locator("tr[data-key]").first).to_have_attribute("data-best", "true")
    expect(page.locator(".primary:visible")).to_have_count(0)
    page.get_by_role("button", name="Best so far: more").click()
    expect(page.get_by_role("button", name="Save as PNG")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Add runs…").press("Enter")
    expect(page.get_by_label("New values")).to_be_visible()
    page.keyboard.press("Escape")
    for width in (1024, 640, 390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = (
            "all => all.filter((e) => e.scrollHeight > e.clientHeight + 1).map((e) => e.innerText)"
        )
        assert page.locator(".fact > *, .fact").evaluate_all(cut) == []
    page.set_viewport_size({"width": 1280, "height": 900})
