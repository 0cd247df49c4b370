"""Exports of all recorded data by the JSON API."""

import csv
import io
from typing import Any

import pytest
from pyarrow import parquet
from starlette.testclient import TestClient

from db.database import Database
from db.tables import Run
from db.telemetry.export import PAGE_ROWS
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record

STEPS = PAGE_ROWS + 1


@pytest.fixture
def recorded(database: Database, running: Run) -> None:
    """A run of more steps than one page has, with a skip and a metric."""
    skips = make_events([7])
    steps = make_steps([1.0] * STEPS, skipped=[7])
    record(database, running, steps, events=[*skips, make_metric(9, float("nan"))])


@pytest.mark.sql
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_have_every_row(recorded: None, script: TestClient, kind: str) -> None:
    """An export in any format has every row in order; its name has the run and the content."""
    steps = _rows(script, "steps", kind)
    assert [int(row["step"]) for row in steps] == list(range(1, STEPS + 1))
    events = _rows(script, "events", kind)
    assert [(int(row["step"]), row["kind"]) for row in events] == [(7, "backoff"), (7, "skip")]
    [metric] = _rows(script, "metrics", kind)
    assert (metric["name"], str(metric["value"]).lower()) == ("val/accuracy", "nan")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_arrive_in_pieces_under_their_name(
    recorded: None, script: TestClient, kind: str
) -> None:
    """An export is sent while it is made, so its length is not declared."""
    with script.stream("GET", f"/api/v1/runs/1/export/steps.{kind}") as answer:
        assert "content-length" not in answer.headers
        disposition = answer.headers["content-disposition"]
        assert disposition == f'attachment; filename="run1-steps.{kind}"'
        assert len([piece for piece in answer.iter_raw() if piece]) > 1


def test_export_is_behind_the_sign_in(recorded: None, stranger: TestClient) -> None:
    """An export requires a sign-in."""
    answer = stranger.get("/api/v1/runs/1/export/steps.csv")
    assert answer.status_code == 401
    assert b"elapsed_ms" not in answer.content


@pytest.mark.parametrize(
    ("path", "status"),
    [("7/export/steps.csv", 404), ("1/export/users.csv", 422), ("1/export/steps.xls", 422)],
)
def test_unknown_ids_are_rejected(running: Run, script: TestClient, path: str, status: int) -> None:
    """An export of an unknown run, table or format is an error."""
    assert script.get(f"/api/v1/runs/{path}").status_code == status


def test_page_links_every_file(recorded: None, browser: TestClient) -> None:
    """A run's page links to each export file."""
    page = browser.get("/runs/1").text
    for name in ("steps", "events", "metrics"):
        for kind in ("csv", "parquet"):
            assert f'href="/api/v1/runs/1/export/{name}.{kind}"' in page


@pytest.mark.slow
def test_api_documents_its_files(script: TestClient) -> None:
    """OpenAPI lists the exports and their formats."""
    description = script.get("/api/v1/openapi.json").json()
    operation = description["paths"]["/api/v1/runs/{run_id}/export/{name}.{kind}"]["get"]
    choices = [each["schema"].get("enum") for each in operation["parameters"]]
    assert ["steps", "events", "metrics"] in choices
    assert set(operation["responses"]["200"]["content"]) >= {
        "text/csv",
        "application/vnd.apache.parquet",
    }


def _rows(script: TestClient, name: str, kind: str) -> list[dict[str, Any]]:
    answer = script.get(f"/api/v1/runs/1/export/{name}.{kind}")
    assert answer.status_code == 200
    if kind == "csv":
        return list(csv.DictReader(answer.text.splitlines()))
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    return rows
