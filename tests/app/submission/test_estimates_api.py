"""What a run is likely to cost, as the form asks for it."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.queue import workers
from db.tables import Run, User, Worker
from tests.app.conftest import DIGITS
from tests.db.queue.test_estimates import finished

pytestmark = pytest.mark.sql

ASKED = {"recipe": "digits", "precision": "fp16", "steps": 600, "batch_size": 8}


def test_a_cost_is_told_in_figures_and_words(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Time from the slowest to the fastest like run, and what its checkpoints take."""
    told = script.get("/api/v1/estimates", params=ASKED).json()
    assert (told["told"], told["seconds"], told["checkpoint_bytes"]) == ([], None, None)
    finished(database, ada, 2.0, 8, 1_000_000, 500_000)
    finished(database, ada, 5.0, 8, 1_000_000, 500_000)
    told = script.get("/api/v1/estimates", params=ASKED | {"every_steps": 250}).json()
    assert told["seconds"] == {"least": 120.0, "most": 300.0}
    assert told["like_runs"] == [2, 1]
    assert told["told"] == [
        "2 min 0 s to 5 min 0 s of steps, at the 2 to 5 steps/s of 2 similar runs",
        "3 checkpoints of 1.5 MB, 4.5 MB",
    ]
    told = script.get("/api/v1/estimates", params=ASKED | {"batch_size": 9}).json()
    assert told["told"][0].endswith("of 2 similar runs, of other batch sizes")


def test_runs_of_other_sizes_are_not_alike(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """Their checkpoints say nothing, and their pace is told as theirs; rates make no difference."""
    finished(database, ada, 2.0, 8, 1_000_000)
    settings = {"width": 64, "name": "tanh", "rate": 0.1}
    with database.writing() as session:
        run = session.get_one(Run, 1)
        run.config = run.config | {"recipe": settings}
    sizes = ["recipe.width=64", "recipe.name=tanh", "recipe.rate=0.3", "recipe.later=5"]
    told = script.get("/api/v1/estimates", params=ASKED | {"size": sizes}).json()
    assert (told["same_sizes"], told["checkpoint_bytes"]) == (True, 1_000_000)
    told = script.get("/api/v1/estimates", params=ASKED | {"size": "recipe.width=128"}).json()
    assert (told["same_sizes"], told["checkpoint_bytes"], told["like_runs"]) == (False, None, [1])
    assert told["told"] == ["5 min 0 s of steps, at the 2 steps/s of run 1, of other sizes"]
    finished(database, ada, 9.0, 4)
    told = script.get("/api/v1/estimates", params=ASKED | {"size": "recipe.width=128"}).json()
    assert (told["same_sizes"], told["same_batch_size"], told["like_runs"]) == (True, False, [2])


def test_a_recipe_that_only_the_drained_offer_is_told(
    database: Database, offered: None, script: TestClient
) -> None:
    """Before it is submitted, as its row in the queue says it then."""
    with database.writing() as session:
        worker = session.get_one(Worker, 1)
        workers.drain(session, worker.id)
    told = script.get("/api/v1/estimates", params=ASKED).json()["told"]
    assert told == [f"it has to wait: all workers that offer it are drained: {worker.name}"]


def test_memory_is_told_once_a_worker_has_counted(
    database: Database, offered: None, script: TestClient
) -> None:
    """Beside the device's, with copies in half precision where there are any."""
    assert script.get("/api/v1/estimates", params=ASKED).json()["memory_bytes"] is None
    counted = {"weight_bytes": 4 * 2**30, "gradient_bytes": 2**30, "optimizer_bytes": 2 * 2**30}
    for cast_bytes, words in (
        (2**29, "7.5 GiB for weights, more than the 7.45 GiB of any device that is up"),
        (2**28, "7.25 GiB of a device's 7.45 GiB for weights, gradients and optimizers"),
    ):
        memory = counted | {"cast_bytes": cast_bytes}
        with database.writing() as session:
            workers.offer(session, 1, [DIGITS | {"memory": memory}])
        told = script.get("/api/v1/estimates", params=ASKED).json()
        assert told["memory_bytes"] == 7 * 2**30 + cast_bytes
        assert all(part in told["told"][0] for part in words.split(", "))
        assert told["told"][0].endswith("activations are not counted")
    plain = script.get("/api/v1/estimates", params=ASKED | {"precision": "fp32"}).json()
    assert plain["memory_bytes"] == 7 * 2**30


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"recipe": "yours"}, 404), ({"steps": "-1"}, 422), ({"batch_size": "0"}, 422)],
)
def test_what_makes_no_sense_is_refused(
    offered: None, script: TestClient, changes: dict[str, Any], status: int
) -> None:
    """By the name of what was asked."""
    answer = script.get("/api/v1/estimates", params=ASKED | changes)
    assert answer.status_code == status
    assert next(iter(changes)) in answer.text
