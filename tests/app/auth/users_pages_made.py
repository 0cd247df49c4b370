"""Shared helpers of the tests of users pages."""

from fastapi import FastAPI
from starlette.testclient import TestClient

from app.http.credentials import cookie_name
from db.access import accounts
from db.database import Database
from db.tables import User


def browser_of(app: FastAPI, database: Database, user: User) -> TestClient:
    """Return a user's browser."""
    with database.writing() as session:
        secret, row = accounts.start_session(session, user)
        token = row.csrf_token
    client = TestClient(app, base_url="http://localhost", follow_redirects=False)
    client.cookies.set(cookie_name(app.state.settings), secret, domain="localhost.local")
    client.headers["x-csrf-token"] = token
    return client
