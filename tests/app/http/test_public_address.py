"""Links to copy have the public address, or a warning that they work on this machine only."""

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.server_address import explain_local
from db.database import Database
from db.settings import Settings
from db.tables import User
from tests.app.auth.users_pages_made import browser_of
from tests.app.conftest import submit

HERE = "Links to localhost open only on this machine: for others, set HALFSTEP_PUBLIC_URL"


def post_links(database: Database, ada: User, browser: TestClient) -> list[str]:
    """Return the pages with a link to a run, with an invitation, and with the alert channels."""
    run = submit(database, ada)
    shared = browser.post("/links", data={"runs": str(run.id), "days": "7"})
    invited = browser.post("/people", data={"name": "Bob", "project": "", "role": "member"})
    return [shared.text, invited.text, browser.get("/alerts").text]


def test_a_link_that_opens_only_on_this_machine_says_so(
    database: Database, ada: User, browser: TestClient
) -> None:
    """A link that works on the server's machine only has a warning; alerts have their own
    notice.
    """
    shared, invited, alerts = post_links(database, ada, browser)
    assert HERE in shared
    assert HERE in invited
    assert HERE.replace("localhost", "127.0.0.1") in alerts


def test_links_have_the_public_address(
    app: FastAPI, database: Database, ada: User, settings: Settings
) -> None:
    """Links have the public address, even for a browser on the server's machine, and no warning."""
    app.state.settings = settings.model_copy(update={"public_url": "https://lab.example/h/"})
    shared, invited, alerts = post_links(database, ada, browser_of(app, database, ada))
    assert "https://lab.example/h/shared#" in shared
    assert "https://lab.example/h/?token=" in invited
    assert "open only on this machine" not in shared + invited + alerts


@pytest.mark.parametrize("url", ["https://lab.example", "http://10.0.0.2:8000"])
def test_other_addresses_are_not_local(url: str) -> None:
    """Links with names and addresses of a network have no warning."""
    assert explain_local(url) == ""
