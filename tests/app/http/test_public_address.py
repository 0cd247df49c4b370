"""Links to hand out: to the public address, or with a warning that they open only here."""

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
    """Return the pages with a link to a run, an invitation, and the channels of alerts."""
    run = submit(database, ada)
    shared = browser.post("/links", data={"runs": str(run.id), "days": "7"})
    invited = browser.post("/people", data={"name": "Bob", "project": "", "role": "member"})
    return [shared.text, invited.text, browser.get("/alerts").text]


def test_a_link_that_opens_only_on_this_machine_says_so(
    database: Database, ada: User, browser: TestClient
) -> None:
    """A browser of the server's machine is told so; alerts have their own notice."""
    shared, invited, alerts = post_links(database, ada, browser)
    assert HERE in shared
    assert HERE in invited
    assert HERE.replace("localhost", "127.0.0.1") in alerts


def test_links_have_the_public_address(
    app: FastAPI, database: Database, ada: User, settings: Settings
) -> None:
    """Links have it even for a browser of the server's machine, and there is no warning."""
    app.state.settings = settings.model_copy(update={"public_url": "https://lab.example/h/"})
    shared, invited, alerts = post_links(database, ada, browser_of(app, database, ada))
    assert "https://lab.example/h/shared#" in shared
    assert "https://lab.example/h/?token=" in invited
    assert "open only on this machine" not in shared + invited + alerts


@pytest.mark.parametrize("url", ["https://lab.example", "http://10.0.0.2:8000"])
def test_other_addresses_are_not_local(url: str) -> None:
    """Names and addresses of a network may be reached by others."""
    assert explain_local(url) == ""
