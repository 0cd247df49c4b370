"""What a run is likely to cost, as the form asks for it."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from db.database import Database
from db.tables import User
from tests.db.test_estimates import finished

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
        "2 min 0 s to 5 min 0 s of steps, at the 2 to 5 steps/s of 2 like runs",
        "3 checkpoints of 1.5 MB, 4.5 MB",
    ]
    told = script.get("/api/v1/estimates", params=ASKED | {"batch_size": 9}).json()
    assert told["told"][0].endswith("of 2 like runs, of other batch sizes")


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
