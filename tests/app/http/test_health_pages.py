"""Health checks with a database that works, is locked or is unreachable."""

from fastapi.testclient import TestClient
from sqlalchemy import text

from app.main import create_app
from db.database import Database
from db.settings import Settings


def test_health_needs_no_sign_in(stranger: TestClient) -> None:
    """Both health checks work without a sign-in."""
    assert stranger.get("/healthz").json() == {"status": "ok"}
    assert stranger.get("/readyz").json() == {"status": "ok", "database": "ok"}


def test_a_locked_database_is_not_ready_and_the_server_is_alive(
    stranger: TestClient, database: Database
) -> None:
    """A locked database delays neither health check; SQLite's is reported as locked."""
    with database.writing() as session:
        session.execute(text("UPDATE projects SET share = 1"))
        assert stranger.get("/healthz").json() == {"status": "ok"}
        ready = stranger.get("/readyz")
    if database.engine.dialect.name == "sqlite":
        assert (ready.status_code, "locked" in ready.json()["database"]) == (503, True)
    else:  # where a writer locks rows, not the database
        assert ready.status_code == 200


def test_a_database_that_is_away_is_not_ready(settings: Settings) -> None:
    """Without a database the server is alive but not ready, and shows no address or password."""
    away = Database("postgresql+psycopg://boss@127.0.0.1:1/prod?password=sesame")
    with TestClient(create_app(settings, away), base_url="http://localhost") as client:
        assert client.get("/healthz").status_code == 200
        ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["database"]) == (503, "the database does not answer")
