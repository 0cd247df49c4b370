"""The background conversion of steps, and pages during it."""

from threading import Event

import obstore
import pytest
from fastapi.testclient import TestClient
from obstore.store import MemoryStore

from app.files import step_conversion_job
from app.files.step_conversion_job import StepConversionJob
from db.database import Database
from db.tables import Run
from db.telemetry import step_conversion
from tests.db.telemetry.earlier_steps import as_file, as_rows
from tests.db.telemetry.telemetry_made import make_steps, record


def test_a_run_says_that_it_is_being_converted(
    database: Database, running: Run, browser: TestClient, script: TestClient
) -> None:
    """The page and the steps of a run say that it is being converted, lists do not; a moment later
    all steps are there.
    """
    record(database, running, make_steps([1.0] * 300))
    as_rows(database, running)
    for path in ("/runs/1", "/api/v1/runs/1/series"):
        answer = (script if path.startswith("/api") else browser).get(path)
        assert (answer.status_code, "being converted" in answer.text) == (503, True), path
    assert browser.get("/runs").status_code == 200
    assert script.get("/api/v1/runs").status_code == 200
    StepConversionJob(database, Event()).convert_due()
    assert browser.get("/runs/1").status_code == 200
    assert script.get("/api/v1/runs/1/series").json()["total"] == 300


def test_a_run_that_cannot_be_converted_delays_no_other(
    database: Database,
    running: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run whose file is missing delays no other, and is converted once the file is back."""
    store = MemoryStore()
    database.open_store = lambda: store
    record(database, running, make_steps([1.0] * 300))
    key = as_file(database, store, running)
    content = bytes(obstore.get(store, key).bytes())
    obstore.put(store, "steps/0/of-another-run.parquet", b"")
    obstore.delete(store, key)
    job = StepConversionJob(database, Event())
    job.convert_due()
    assert (
        f"the steps of run 1 cannot be converted: The steps of a run that has ended are in {key}"
        in caplog.text
    )
    obstore.put(store, key, content)
    job.convert_due()
    with database.reading() as session:
        assert step_conversion.due(session) == [1]  # not yet again
    monkeypatch.setattr(step_conversion_job, "AGAIN_SECONDS", -1.0)
    StepConversionJob(database, Event()).convert_due()
    with database.reading() as session:
        assert step_conversion.due(session) == []


def test_a_stop_ends_the_conversion(database: Database, running: Run) -> None:
    """A conversion that the server's stop interrupted is continued at the next start."""
    record(database, running, make_steps([1.0] * 300))
    as_rows(database, running)
    stopping = Event()
    stopping.set()
    StepConversionJob(database, stopping).convert_due()
    with database.reading() as session:
        assert step_conversion.due(session) == [1]
