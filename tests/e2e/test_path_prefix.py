"""A real browser with a real nginx that serves the installation below a path, with TLS."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from db.access import accounts
from db.database import Database
from db.queue import claims, queue
from db.settings import Settings
from db.tables import User
from tests.app.conftest import offer_digits, serving
from tests.app.http.proxies_made import NGINX, nginx
from tests.browser import DRAWN
from tests.db.conftest import submit
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.site import free_port, until


@pytest.mark.skipif(NGINX is None, reason="nginx is missing: apt-get install nginx-light")
def test_pages_scripts_and_live_streams_work_below_a_path(
    chromium: Browser, settings: Settings, database: Database, ada: User, tmp_path: Path
) -> None:
    """Signing in, opening a run and live steps work below a path, and no request leaves it."""
    port = free_port()
    address = f"https://127.0.0.1:{port}/halfstep"
    behind = settings.model_copy(update={"trusted_proxies": "127.0.0.1", "public_url": address})
    offer_digits(database)
    with database.writing() as session:
        submit(session, ada)
        token = accounts.make_link_token(session, ada)
        limits = {"precisions": ["fp16"], "free_devices": [0], "lease_seconds": 600.0}
        run = claims.claim(session, 1, recipes=["digits"], **limits)
        assert run is not None
        queue.seconds_since_start(session, run)
        queue.start(session, run.id, 1)
    record(database, run, make_steps([3.0, 2.5]))
    with (
        serving(behind, database) as (_server, upstream),
        nginx(tmp_path / "nginx", port, upstream, block=1),
    ):
        context = chromium.new_context(ignore_https_errors=True)
        page = context.new_page()
        requested: list[str] = []
        page.on("request", lambda sent: requested.append(sent.url))
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{address}/?token={token}")
        page.get_by_role("button").first.click()
        page.get_by_role("link", name="digits").first.click()
        expect(page).to_have_url(f"{address}/runs/1")
        until(lambda: page.evaluate(DRAWN) >= 2)
        record(database, run, make_steps([2.0], first=3))
        until(lambda: page.evaluate(DRAWN) >= 3)
        for name in ("Sweeps", "Workers", "Recipes", "Alerts", "Help", "New run"):
            page.get_by_role("link", name=name).first.click()
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            assert page.url.startswith(f"{address}/")
        context.close()
    inside = (f"{address}/", "data:", "blob:")
    assert [url for url in requested if not url.startswith(inside)] == []
    assert complaints == []
