"""A real browser with a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from app.http.credentials import cookie_name
from db.access import accounts
from db.database import Database
from db.settings import Settings
from db.tables import User
from tests.app.conftest import offered, running, serving, settings  # noqa: F401 - fixtures
from tests.browser import launch

MILLISECONDS = 15_000  # patience with a slow machine


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the journeys in `make test`, and run them in one process that starts Chromium once.

    The other tests run in `make test-all`, with each module's tests in one process.
    """
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        if item.get_closest_marker("journey"):
            item.add_marker(pytest.mark.xdist_group("journeys"))
        else:
            item.add_marker("extended")
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The system's own Chromium, closed before other tests: Playwright keeps the event loop."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def site_address(settings: Settings, database: Database) -> Iterator[str]:  # noqa: F811
    """The address of a server for one test."""
    with serving(settings, database) as (_server, address):
        yield address


@pytest.fixture
def page(
    chromium: Browser,
    settings: Settings,  # noqa: F811
    database: Database,
    ada: User,
    site_address: str,
) -> Iterator[Page]:
    """Ada's signed-in browser; an error of the pages' scripts fails the test."""
    with database.writing() as session:
        secret, _sign_in = accounts.start_session(session, ada, by_link=True)
    context = chromium.new_context(base_url=site_address, viewport={"width": 1280, "height": 900})
    context.add_cookies([{"name": cookie_name(settings), "value": secret, "url": site_address}])
    context.set_default_timeout(MILLISECONDS)
    expect.set_options(timeout=MILLISECONDS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.extend(_complaint(message)))
    yield page
    context.close()
    assert complaints == []


def refuse_once(page: Page, pattern: str) -> list[str]:
    """Respond to each matching URL with 503 once; return the refused URLs."""
    refused: list[str] = []

    def refuse(route: Route) -> None:
        if route.request.url in refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=503, json={"detail": "The database is away."})

    page.route(pattern, refuse)
    return refused


def _complaint(message: ConsoleMessage) -> list[str]:
    # That an answer was an error, or the server away, is what some tests are about.
    is_network = message.text.startswith("Failed to load resource")
    return [message.text] if message.type == "error" and not is_network else []
