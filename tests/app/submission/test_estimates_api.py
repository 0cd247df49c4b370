"""Estimated cost of a run, as the form requests it."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.queue import workers
from db.tables import LatestMetric, Run, User, Worker
from tests.app.conftest import DIGITS
from tests.db.queue.estimates_made import add_finished

pytestmark = pytest.mark.sql_sample

ASKED = {"recipe": "digits", "precision": "fp16", "steps": 600, "batch_size": 8}


def test_a_cost_has_numbers_and_sentences(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """The estimate has the time of the slowest and the fastest similar run, and the size of its
    checkpoints, as numbers and text.
    """
    estimate = script.get("/api/v1/estimates", params=ASKED).json()
    assert (estimate["sentences"], estimate["seconds"], estimate["checkpoint_bytes"]) == (
        [],
        None,
        None,
    )
    add_finished(database, ada, 2.0, 8, 1_000_000, 500_000)
    add_finished(database, ada, 5.0, 8, 1_000_000, 500_000)
    estimate = script.get("/api/v1/estimates", params=ASKED | {"every_steps": 250}).json()
    assert estimate["seconds"] == {"least": 120.0, "most": 300.0}
    assert estimate["like_runs"] == [2, 1]
    assert estimate["sentences"] == [
        "About 2 min 0 s to 5 min 0 s of training (2 similar runs: 2–5 steps/s)",
        "3 checkpoints of 1.43 MiB, 4.29 MiB in total",
    ]
    estimate = script.get("/api/v1/estimates", params=ASKED | {"batch_size": 9}).json()
    assert "(2 similar runs of other batch sizes: 2–5 steps/s)" in estimate["sentences"][0]


def test_runs_of_other_sizes_are_not_alike(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Runs whose checkpoints have another size are not used for the estimate, which names their
    sizes; learning rates do not matter.
    """
    add_finished(database, ada, 2.0, 8, 1_000_000)
    settings = {"width": 64, "name": "tanh", "rate": 0.1}
    with database.writing() as session:
        run = session.get_one(Run, 1)
        run.config = run.config | {"recipe": settings}
    sizes = ["recipe.width=64", "recipe.name=tanh", "recipe.rate=0.3", "recipe.later=5"]
    estimate = script.get("/api/v1/estimates", params=ASKED | {"size": sizes}).json()
    assert (estimate["same_sizes"], estimate["checkpoint_bytes"]) == (True, 1_000_000)
    estimate = script.get("/api/v1/estimates", params=ASKED | {"size": "recipe.width=128"}).json()
    assert (estimate["same_sizes"], estimate["checkpoint_bytes"], estimate["like_runs"]) == (
        False,
        None,
        [1],
    )
    assert estimate["sentences"] == [
        "About 5 min 0 s of training (run 1 of other sizes: 2 steps/s)"
    ]
    add_finished(database, ada, 9.0, 4)
    estimate = script.get("/api/v1/estimates", params=ASKED | {"size": "recipe.width=128"}).json()
    assert (estimate["same_sizes"], estimate["same_batch_size"], estimate["like_runs"]) == (
        True,
        False,
        [2],
    )


def test_a_recipe_offered_only_by_drained_workers_has_a_sentence(
    database: Database, offered: None, script: TestClient
) -> None:
    """The estimate for a recipe that only drained workers offer has the queue's pending reason."""
    with database.writing() as session:
        worker = session.get_one(Worker, 1)
        workers.drain(session, worker.id)
    estimate = script.get("/api/v1/estimates", params=ASKED).json()["sentences"]
    assert estimate == [f"It must wait: all workers that offer it are drained: {worker.name}"]


def test_memory_is_estimated_after_a_worker_has_counted(
    database: Database, offered: None, script: TestClient
) -> None:
    """A memory estimate is shown next to the device's memory, with half-precision copies if any."""
    assert script.get("/api/v1/estimates", params=ASKED).json()["memory_bytes"] is None
    counted = {"weight_bytes": 4 * 2**30, "gradient_bytes": 2**30, "optimizer_bytes": 2 * 2**30}
    for cast_bytes, words in (
        (2**29, "optimizer state: about 7.5 GiB, more than the 7.45 GiB of any device that is up"),
        (2**28, "Weights, gradients and optimizer state: about 7.25 GiB of a device's 7.45 GiB"),
    ):
        memory = counted | {"cast_bytes": cast_bytes}
        with database.writing() as session:
            workers.offer(session, 1, [DIGITS | {"memory": memory}])
        estimate = script.get("/api/v1/estimates", params=ASKED).json()
        assert estimate["memory_bytes"] == 7 * 2**30 + cast_bytes
        assert all(part in estimate["sentences"][0] for part in words.split(", "))
        assert estimate["sentences"][0].endswith("without activations")
    plain = script.get("/api/v1/estimates", params=ASKED | {"precision": "fp32"}).json()
    assert plain["memory_bytes"] == 7 * 2**30


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"recipe": "yours"}, 404), ({"steps": "-1"}, 422), ({"batch_size": "0"}, 422)],
)
def test_invalid_requests_are_rejected(
    offered: None, script: TestClient, changes: dict[str, Any], status: int
) -> None:
    """Invalid parameters of an estimate are rejected by field."""
    answer = script.get("/api/v1/estimates", params=ASKED | changes)
    assert answer.status_code == status
    assert next(iter(changes)) in answer.text


def test_speed_and_memory_of_each_precision_are_those_measured(
    database: Database, ada: User, offered: None, script: TestClient, browser: TestClient
) -> None:
    """Speed and memory of a precision are medians of runs with the same batch size, without
    extrapolation to another one.
    """
    for speed, peak in ((2.0, 2.0**30), (5.0, 2.0**31), (4.0, None)):
        run_id = add_finished(database, ada, speed, 64)
        if peak is not None:
            name = "run/peak_memory_bytes"
            with database.writing() as session:
                session.add(LatestMetric(run_id=run_id, name=name, step=1, value=peak))
    asked = ASKED | {"batch_size": 64}
    measured = script.get("/api/v1/estimates", params=asked).json()["measured"]
    assert measured == {
        "fp16": {
            "runs": 3,
            "steps_per_second": 4.0,
            "memory_bytes": 1.5 * 2**30,
            "speed_text": "4 steps/s",
            "memory_text": "1.5 GiB",
        }
    }
    page = browser.get("/runs/new?recipe=digits").text
    assert 'data-speed="fp16">4 steps/s<' in page
    assert 'data-memory="fp16">1.5 GiB<' in page
    assert 'data-speed="bf16">not measured yet<' in page
    assert script.get("/api/v1/estimates", params=ASKED).json()["measured"] == {}
