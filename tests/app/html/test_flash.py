"""Messages of a form that appear on the next page."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.html.rendering import FLASH_COOKIE
from app.http.credentials import cookie_name
from db.access import accounts
from db.database import Database
from db.tables import User


@pytest.mark.parametrize(("scheme", "prefix"), [("http", ""), ("https", "__Host-")])
def test_the_flash_cookie_is_as_secure_as_the_session(
    app: FastAPI, database: Database, ada: User, scheme: str, prefix: str
) -> None:
    """A flash cookie of a TLS request is sent over TLS only."""
    with database.writing() as session:
        secret, row = accounts.start_session(session, ada, by_link=True)
        token = row.csrf_token
    name = prefix + cookie_name(app.state.settings)
    headers = {"Cookie": f"{name}={secret}", "X-CSRF-Token": token}
    with TestClient(app, f"{scheme}://localhost", headers=headers, follow_redirects=False) as it:
        answer = it.post("/projects", data={"name": "vision"})
    assert answer.headers["set-cookie"].startswith(f"{FLASH_COOKIE}=The%20project%20is%20created.")
    assert ("; Secure" in answer.headers["set-cookie"]) is (scheme == "https")
