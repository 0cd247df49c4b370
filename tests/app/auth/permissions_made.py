"""Shared helpers of the tests of permissions."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.testclient import TestClient

from db.access import accounts
from db.database import Database
from db.tables import User
from tests.app.auth.authentication_made import PUBLIC


def routes_of(app: FastAPI) -> list[tuple[str, str, Callable[..., Any]]]:
    """Method, path and function of each route that needs a sign-in."""
    return [
        (method, route.path, route.original_route.endpoint)
        for route in iter_route_contexts(app.routes)
        for method in sorted(getattr(route.original_route, "methods", ()) or ())
        if route.path and route.path not in PUBLIC and "/ingest" not in route.path
    ]


def script_of(app: FastAPI, database: Database, user: User) -> TestClient:
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, user, "script")
    headers = {"Authorization": f"Bearer {token}"}
    return TestClient(app, base_url="http://localhost", headers=headers, follow_redirects=False)
