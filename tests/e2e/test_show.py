"""The page of `halfstep show` while the folder is being read."""

import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from app.show import Mirror
from db.access import accounts
from db.database import Database
from db.settings import Settings
from halfstep.api_client.credentials import Credentials
from tests import warm
from tests.app.conftest import serving
from tests.app.test_show import SCRIPT
from tests.app.uploading import write_token


def test_runs_come_into_the_open_page(
    settings: Settings, database: Database, chromium: Browser, tmp_path: Path
) -> None:
    """The open page of `halfstep show` says what it reads, and lists runs of new projects live."""
    (tmp_path / "script.py").write_text(SCRIPT)
    assert warm.run([sys.executable, "script.py"], cwd=tmp_path).returncode == 0
    with database.writing() as session:
        viewer = accounts.make_user(session, "viewer")
        token = accounts.make_link_token(session, viewer, is_lasting=True)
        owner = accounts.make_user(session, "owner", is_admin=True)
    folder = tmp_path / "halfstep-runs"
    with serving(settings, database) as (server, address):
        credentials = Credentials(address, write_token(database, owner))
        mirror = server.app.state.shown_folder = Mirror(folder, credentials, database, viewer.id)
        page = chromium.new_page(base_url=address)
        page.goto(f"/?token={token}")
        reading = page.get_by_text(f"Reading 2 runs of {folder}: 0 are complete.")
        expect(reading).to_be_visible()
        expect(page.locator("main")).not_to_contain_text("worker")
        with mirror.following():
            expect(page.locator("tr[data-key] .name a")).to_have_text(["second", "first"])
            expect(page.locator("[data-reading]")).to_have_count(0)
            assert page.url == f"{address}/runs"
        page.close()
