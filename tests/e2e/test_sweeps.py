"""A sweep, end to end: a real browser, server, worker and training."""

import pytest
from playwright.sync_api import Page, expect

from db.settings import Settings
from tests.site import Site, until

PATIENCE = 90_000  # milliseconds, for a slow machine


@pytest.fixture
def settings(site: Site) -> Settings:
    """The server's settings: the same data folder and database as the worker's."""
    return Settings(data=site.data, database_url=site.url)


def test_three_learning_rates_are_tried(site: Site, page: Page) -> None:
    """A person types three learning rates into the form of one run, is asked once, and sees the
    sweep go by itself to its end: values, charts, and the best one, led on to the comparison."""
    with site.worker():
        until(lambda: site.offers("digits"))
        page.goto("/runs/new?recipe=digits")
        # The scale is searched for in the first few, and a run that applies nothing has no value.
        page.locator('[name="training.steps"]').fill("25")
        page.get_by_role("link", name="Sweep", exact=True).click()
        page.wait_for_url("**/sweeps/new")
        expect(page.locator('[name="training.steps"]')).to_have_value("25")
        page.locator('[name="recipe.learning_rate"]').fill("0.3, 0.03, 0.003")
        page.get_by_label("Metric").fill("val/accuracy")
        page.get_by_role("button", name="Count the runs").click()
        page.get_by_role("button", name="Queue 3 runs").click()
        page.wait_for_url("**/sweeps/1")
        progress = page.get_by_text("of 3 runs have ended")
        expect(progress).to_contain_text("3 of 3", timeout=PATIENCE)
        expect(page.locator(".sweep-facts .status")).to_have_text("finished")
        page.wait_for_selector('[data-trials-plot][data-drawn="3"]')
        page.locator("[data-parallel-plot]").scroll_into_view_if_needed()
        page.wait_for_selector('[data-parallel-plot][data-drawn="3"]')
    expect(page.locator("tr[data-key]")).to_have_count(3)
    expect(page.locator("tr[data-best=true]")).to_have_count(1)
    expect(page.locator("tr[data-key='3'] .name")).to_contain_text("learning_rate=0.003")
    page.get_by_role("link", name="Compare the best 3").click()
    expect(page.locator("h1")).to_have_text("Compare 3 runs")
    page.goto("/audit")  # to count is to change nothing
    audit_events = page.locator("tbody tr", has_text="/sweeps")
    expect(audit_events).to_have_count(1)
    expect(audit_events).to_contain_text("sweep 1 of 3 runs, recipe digits")
