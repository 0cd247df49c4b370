"""Damaged runs in a real browser."""

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import MetricBlock, Run, StepBlock
from tests.app.telemetry.test_damage import damage_blocks
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


@pytest.mark.journey
def test_a_damaged_run_says_what_it_lacks_wherever_it_is_drawn(
    database: Database, running: Run, page: Page
) -> None:
    """Page and comparisons of a damaged run name steps and metrics, at any zoom and tab."""
    points = [make_metric(step, 0.5) for step in range(17_000)]
    record(database, running, make_steps([1.0] * 9000), events=points)
    record(database, running, events=[make_metric(17_000, 0.5)])  # after it, blocks have the others
    notice = page.locator("[data-damage]")
    page.goto("/runs/1")
    expect(page.get_by_role("tab", name="Charts")).to_be_visible()
    expect(notice).to_be_hidden()
    damage_blocks(database, StepBlock, first=4096)
    damage_blocks(database, MetricBlock, first=2048)
    for path in ("/runs/1", "/runs/1?tab=log", "/runs/1?first=5&last=90", "/compare?runs=1"):
        page.goto(path)
        expect(notice).to_contain_text("Run 1 is damaged: steps 4,096 to 8,191, val/accuracy at")
