"""The grid of workers in a real browser."""

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.tables import Run, User
from tests.app.conftest import CPU, start_run
from tests.db.conftest import DIGITS, add_worker


@pytest.mark.journey
def test_the_grid_is_live_and_a_worker_is_drained_on_its_page(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """A run appears on its device, a new worker in its row, and a drain at its worker."""
    page.goto("/workers")
    cell = page.locator(".devices li").first
    expect(cell).to_have_text("cpu 0: free")
    run: Run = start_run(database, ada)
    expect(cell).to_have_text(f"cpu 0: run {run.id}")
    add_worker(database, "a-first", [DIGITS], [CPU])
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("tbody tr").first).to_contain_text("a-first")
    page.get_by_role("link", name="w1").click()
    page.get_by_role("button", name="Drain (runs finish)").click()
    expect(page.locator(".badge", has_text="drained")).to_be_visible()
    page.get_by_role("link", name="Workers").last.click()
    expect(page.locator("tr", has_text="w1")).to_contain_text("drained")
