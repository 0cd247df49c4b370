"""A read-only link in a browser without a session."""

from playwright.sync_api import Browser, Page, expect

from db.database import Database
from db.tables import Run, User
from tests.app.conftest import submit
from tests.browser import open_menu
from tests.db.telemetry.telemetry_made import make_events, make_steps, record
from tests.e2e.test_access import found_on


def test_a_link_shows_its_runs_without_sign_in(
    page: Page, chromium: Browser, database: Database, ada: User, running: Run
) -> None:
    """A link shows one run or a comparison with charts; the secret is removed from the URL at
    once; a revoked link shows nothing. axe finds no violations.
    """
    record(database, running, make_steps([1.0] * 60, skipped=[3]), events=make_events([3]))
    other = submit(database, ada)
    for address, text in (
        (f"/runs/{running.id}", "59 applied"),
        (f"/compare?runs={running.id},{other.id}", "Parallel coordinates"),
    ):
        page.goto(address)
        if address.startswith("/runs"):
            open_menu(page)
        page.get_by_text("Share…").click()
        page.get_by_role("button", name="Create link").click()
        context = chromium.new_context()
        guest = context.new_page()
        guest.goto(page.locator("code.secret").inner_text())
        guest.wait_for_url("**/shared/*")
        expect(guest.get_by_text("Shared by ada").first).to_be_visible()
        expect(guest.locator(".js-plotly-plot").first).to_be_visible()
        expect(guest.get_by_text(text)).to_be_visible()
        shown = guest.url
        assert list(found_on(guest)) == []
        page.get_by_role("button", name="Revoke").first.click()
        page.wait_for_url(f"**{address}")
        guest.goto(shown)
        expect(guest.get_by_text("This read-only link has ended")).to_be_visible()
        context.close()
