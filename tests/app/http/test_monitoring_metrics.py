"""Metrics as Prometheus reads them."""

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy import update
from starlette.testclient import TestClient

from app.http.request_metrics import group_of
from app.main import create_app
from db.clock import now
from db.database import Database
from db.errors import Invalid
from db.files.backup import back_up
from db.files.object_store import open_store
from db.settings import Settings
from db.tables import Run, User, Worker
from tests.app.auth.permissions_made import routes_of
from tests.app.conftest import submit
from tests.db.telemetry.telemetry_made import make_steps, record

TOKEN = {"authorization": "Bearer a-long-random-text"}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with a token for Prometheus."""
    return settings.model_copy(update={"metrics_token": SecretStr("a-long-random-text")})


def read_metrics(client: TestClient) -> dict[tuple[str, ...], float]:
    """Return every sample: its name and the values of its labels, and its number."""
    answer = client.get("/metrics", headers=TOKEN)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_a_scrape_has_the_metrics_of_the_service(
    database: Database, ada: User, running: Run, settings: Settings, stranger: TestClient
) -> None:
    """Metrics cover queue, devices, runs, steps and the server process."""
    record(database, running, make_steps([1.0] * 9, skipped=[3]))
    submit(database, ada)
    settings.data.mkdir(exist_ok=True)
    back_up(database, open_store(settings), settings.data / "backup")
    stranger.get("/")
    found = read_metrics(stranger)
    assert found["halfstep_database_up",] == 1
    assert found["halfstep_queue_runs", "device"] == 1
    assert found["halfstep_queue_runs", "no_worker"] == 0
    assert (found["halfstep_devices", "cpu"], found["halfstep_devices_busy", "cpu"]) == (1, 1)
    assert (found["halfstep_runs", "running"], found["halfstep_runs", "failed"]) == (1, 0)
    assert found["halfstep_steps_recorded_total",] == 9
    assert found["halfstep_steps_skipped_total",] == 1
    assert found["halfstep_database_read_seconds",] > 0
    assert found["process_resident_memory_bytes",] > 1e6


def test_operators_see_queue_workers_backups_and_disk(
    database: Database, ada: User, running: Run, settings: Settings, stranger: TestClient
) -> None:
    """Metrics are labelled by project, worker and group of routes, and include open streams."""
    submit(database, ada)
    settings.data.mkdir(exist_ok=True)
    assert stranger.get("/nowhere").status_code == 404
    assert stranger.get("/api/v1/runs").status_code == 401
    found = read_metrics(stranger)
    [project] = {key[1] for key in found if key[0] == "halfstep_queue_project_runs"}
    assert found["halfstep_queue_project_runs", project] == 1
    assert 0 <= found["halfstep_queue_wait_seconds", project] < 3600
    assert {key[0] for key in found} >= {"halfstep_worker_silence_seconds"}
    assert found["halfstep_workers_outdated",] == 0
    assert found["halfstep_database_bytes",] > 10_000
    assert 0 < found["halfstep_disk_free_bytes",] <= found["halfstep_disk_bytes",]
    assert found["halfstep_streams",] == 0
    assert found["halfstep_http_requests_total", "unknown", "4xx"] == 1
    assert found["halfstep_http_requests_total", "api runs", "4xx"] == 1
    assert found["halfstep_http_request_seconds_count", "api runs"] == 1
    assert found["halfstep_runs_damaged",] == 0
    assert found["halfstep_backup_failed",] == 0
    assert ("halfstep_backup_timestamp_seconds",) not in found
    back_up(database, open_store(settings), settings.data / "backup")
    (settings.data / "file").touch()
    with pytest.raises(Invalid):
        back_up(database, open_store(settings), settings.data / "file" / "backup")
    with database.writing() as session:
        session.execute(update(Run).where(Run.id == running.id).values(damage="A file."))
    found = read_metrics(stranger)
    assert found["halfstep_runs_damaged",] == 1
    assert found["halfstep_backup_failed",] == 1
    assert found["halfstep_backup_timestamp_seconds",] > 1.7e9


def test_a_worker_whose_machine_is_gone_alerts_for_a_week(
    database: Database, running: Run, stranger: TestClient
) -> None:
    """A worker whose machine is gone has no time series after a week, so its alert ends."""
    name = "halfstep_worker_silence_seconds"
    for days, is_listed in ((6, True), (8, False)):
        with database.writing() as session:
            session.execute(update(Worker).values(seen_at=now() - days * 86400.0))
        assert (name in {key[0] for key in read_metrics(stranger)}) == is_listed


def test_groups_of_routes_are_few(app: FastAPI) -> None:
    """No route begins with a parameter, so routes form few groups."""
    groups = {group_of(path) for _method, path, _endpoint in routes_of(app)}
    assert {"runs", "api runs"} <= groups
    assert not [group for group in groups if "{" in group]


def test_only_its_token_opens_it(
    app: FastAPI, stranger: TestClient, script: TestClient, browser: TestClient
) -> None:
    """Only the metrics token opens the metrics, and it opens nothing else; without a configured
    token they are disabled.
    """
    assert stranger.get("/metrics").status_code == 401
    assert script.get("/metrics").status_code == 401
    assert browser.get("/metrics").status_code == 401
    assert stranger.get("/metrics", headers={"authorization": b"Bearer \xe9"}).status_code == 401
    assert stranger.get("/api/v1/runs", headers=TOKEN).status_code == 401
    app.state.settings = app.state.settings.model_copy(update={"metrics_token": SecretStr("")})
    off = stranger.get("/metrics", headers={"authorization": "Bearer "})
    assert (off.status_code, "set HALFSTEP_METRICS_TOKEN" in off.text) == (404, True)


def test_an_unreachable_database_is_reported(settings: Settings) -> None:
    """With an unreachable database the scrape still succeeds, so that an alert can report it."""
    silent = Database("postgresql+psycopg://boss@127.0.0.1:1/prod")
    with TestClient(create_app(settings, silent), base_url="http://localhost") as client:
        found = read_metrics(client)
    assert found["halfstep_database_up",] == 0
    assert found["process_resident_memory_bytes",] > 1e6
    assert ("halfstep_workers_up",) not in found
