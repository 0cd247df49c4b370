"""Continuing a run that was cancelled or failed."""

from starlette.testclient import TestClient

from db.database import Database
from db.runs import runs
from db.tables import Run, Status, User
from tests.app.conftest import CONFIG
from tests.app.runs.continue_run_made import end


def test_a_cancelled_run_continues_from_its_last_checkpoint(
    database: Database, running: Run, browser: TestClient, script: TestClient
) -> None:
    """A continued run has the settings, name and tags of the cancelled one, which cannot be
    continued again before that run has ended.
    """
    address = f"/api/v1/runs/{running.id}/continuation"
    early = script.post(address)
    assert (early.status_code, "is running" in early.json()["detail"]) == (409, True)
    end(database, running, Status.CANCELLED, 40, 120, 400)  # the last has no steps left
    page = browser.get(f"/runs/{running.id}").text
    assert f'action="/runs/{running.id}/continuation"' in page
    assert page.count("data-leaves-steps>") == 2
    answer = script.post(address)
    assert answer.status_code == 201
    with database.reading() as session:
        run = runs.get(session, answer.json()["id"])
        assert (run.parent_id, run.parent_step, run.status) == (running.id, 120, "queued")
        assert run.name == running.name
        assert {**run.config, "weights": None} == {**CONFIG, "weights": None}
    again = browser.post(f"/runs/{running.id}/continuation")
    assert again.status_code == 409
    assert f"Run {running.id} is already continued by run {run.id}, which is queued." in again.text
    script.post(f"/api/v1/runs/{run.id}/cancellation")
    anew = browser.post(f"/runs/{running.id}/continuation")
    assert (anew.status_code, anew.headers["location"]) == (303, f"/runs/{run.id + 1}")


def test_a_continuation_is_not_called_by_an_earlier_step(
    database: Database, running: Run, script: TestClient, browser: TestClient
) -> None:
    """The name of a fork has the step at which it starts."""
    end(database, running, Status.CANCELLED, 40)
    with database.writing() as session:
        session.get_one(Run, running.id).name = "base from step 7"
    answer = script.post(f"/api/v1/runs/{running.id}/continuation").json()
    with database.reading() as session:
        assert runs.get(session, answer["id"]).name == "base from step 40"
    form = browser.get(f"/runs/new?from={running.id}&step=40").text
    assert 'value="base from step 40"' in form


def test_a_repeated_request_queues_one_run(
    database: Database, running: Run, script: TestClient
) -> None:
    """A request's idempotency key identifies its run."""
    end(database, running, Status.FAILED, 40)
    address, key = f"/api/v1/runs/{running.id}/continuation", {"Idempotency-Key": "k"}
    first, second = (script.post(address, headers=key).json()["id"] for _ in range(2))
    assert first == second


def test_without_a_checkpoint_nothing_can_be_continued(
    database: Database, ada: User, running: Run, browser: TestClient, script: TestClient
) -> None:
    """Without a checkpoint the page has no button to continue, and the API returns the reason."""
    end(database, running, Status.FAILED)
    result = script.post(f"/api/v1/runs/{running.id}/continuation")
    assert result.status_code == 409
    assert "has no checkpoint before its last step" in result.json()["detail"]
    assert "data-leaves-steps>" not in browser.get(f"/runs/{running.id}").text
