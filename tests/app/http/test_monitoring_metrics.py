"""Metrics as Prometheus reads them."""

import json
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.main import create_app
from db.database import Database
from db.settings import Settings
from db.tables import Run, User
from tests.app.conftest import submit
from tests.db.telemetry.telemetry_made import make_steps, record

TOKEN = {"authorization": "Bearer a-long-random-text"}
DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana.json"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """An operator's who lets Prometheus in."""
    return settings.model_copy(update={"metrics_token": SecretStr("a-long-random-text")})


def served(client: TestClient) -> dict[tuple[str, ...], float]:
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
    database: Database, ada: User, running: Run, stranger: TestClient
) -> None:
    """Queue, devices, runs, steps and this process, all that the dashboard names among it."""
    record(database, running, make_steps([1.0] * 9, skipped=[3]))
    submit(database, ada)
    found = served(stranger)
    assert found["halfstep_database_up",] == 1
    assert found["halfstep_queue_runs", "device"] == 1
    assert found["halfstep_queue_runs", "no_worker"] == 0
    assert (found["halfstep_devices", "cpu"], found["halfstep_devices_busy", "cpu"]) == (1, 1)
    assert (found["halfstep_runs", "running"], found["halfstep_runs", "failed"]) == (1, 0)
    assert found["halfstep_steps_recorded_total",] == 9
    assert found["halfstep_steps_skipped_total",] == 1
    assert found["halfstep_database_read_seconds",] > 0
    assert found["process_resident_memory_bytes",] > 1e6
    expressions = re.findall(r'"expr": "(.*)"', DASHBOARD.read_text())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len(expressions) == sum(len(panel["targets"]) for panel in panels) > 9
    for name in re.findall(r"\b(?:halfstep|process)_\w+", " ".join(expressions)):
        assert name in {key[0] for key in found}, name


def test_only_its_token_opens_it(
    app: FastAPI, stranger: TestClient, script: TestClient, browser: TestClient
) -> None:
    """No other, nor a browser's session; nor does it open anything else. Without one it is off."""
    assert stranger.get("/metrics").status_code == 401
    assert script.get("/metrics").status_code == 401
    assert browser.get("/metrics").status_code == 401
    assert stranger.get("/metrics", headers={"authorization": b"Bearer \xe9"}).status_code == 401
    assert stranger.get("/api/v1/runs", headers=TOKEN).status_code == 401
    app.state.settings = app.state.settings.model_copy(update={"metrics_token": SecretStr("")})
    off = stranger.get("/metrics", headers={"authorization": "Bearer "})
    assert (off.status_code, "set HALFSTEP_METRICS_TOKEN" in off.text) == (404, True)


def test_an_unreachable_database_is_reported(settings: Settings) -> None:
    """The scrape succeeds, so that an alert can be of the database."""
    silent = Database("postgresql+psycopg://boss@127.0.0.1:1/prod")
    with TestClient(create_app(settings, silent), base_url="http://localhost") as client:
        found = served(client)
    assert found["halfstep_database_up",] == 0
    assert found["process_resident_memory_bytes",] > 1e6
    assert ("halfstep_workers_up",) not in found
