"""Twenty tasks of an agent: a question, the tool call that answers it, and the correct answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from db.database import Database
from db.queue import queue
from db.tables import Status, User
from halfstep import Client
from halfstep.mcp.server import server_of
from tests.app.conftest import CONFIG, start_run
from tests.app.telemetry.suggested_actions_made import fall, offer
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.halfstep.mcp.agents import call

pytestmark = pytest.mark.slow

LOWER = "Fork from step 5 with training.learning_rate 0.05"


@dataclass(frozen=True)
class Task:
    """arguments: those of the tool.  answer: extracts the answer from the result."""

    question: str
    tool: str
    answer: Callable[[Any], Any]
    expected: Any
    arguments: dict[str, Any] = field(default_factory=dict)


def _findings(result: Any) -> list[str]:
    return [finding["title"] for finding in result["findings"]]


def _actions(result: Any) -> dict[str, Any]:
    return {each["action"]: each for row in result["findings"] for each in row["actions"]}


TASKS = [
    Task("How many runs are there?", "list_runs", lambda r: len(r["runs"]), 3),
    Task(
        "Which run has failed?",
        "list_runs",
        lambda r: [run["name"] for run in r["runs"]],
        ["broken"],
        {"filter": "status:failed"},
    ),
    Task(
        "Which run skipped most steps?",
        "list_runs",
        lambda r: (r["runs"][0]["id"], r["runs"][0]["skipped"]),
        (1, 34),
        {"sort": "-skipped", "limit": 1},
    ),
    Task(
        "Which runs reached an accuracy above 0.8?",
        "list_runs",
        lambda r: [run["name"] for run in r["runs"]],
        ["good"],
        {"filter": "val/accuracy>0.8"},
    ),
    Task(
        "Where can I look at run 1?",
        "list_runs",
        lambda r: [run["url"].rpartition("/runs/")[2] for run in r["runs"]][-1],
        "1",
    ),
    Task(
        "In which precision is run 1?", "show_run", lambda r: r["precision"], "fp16", {"run_id": 1}
    ),
    Task(
        "Which learning rate had run 1?",
        "show_run",
        lambda r: r["config"]["training"]["learning_rate"],
        0.5,
        {"run_id": 1},
    ),
    Task(
        "Why did run 3 fail?",
        "explain_run",
        lambda r: (r["run"]["status"], r["run"]["error"]),
        ("failed", "RuntimeError: no such file"),
        {"run_id": 3},
    ),
    Task(
        "Is the scale of run 1 healthy?",
        "explain_run",
        lambda r: r["run"]["health"]["word"],
        "collapsing",
        {"run_id": 1},
    ),
    Task(
        "At which step was the first skip of run 1?",
        "explain_run",
        lambda r: r["skipped"]["first"][0]["step"],
        7,
        {"run_id": 1},
    ),
    Task(
        "Whose gradients overflowed there?",
        "explain_run",
        lambda r: r["skipped"]["first"][0]["overflowed"],
        ["head.bias"],
        {"run_id": 1},
    ),
    Task(
        "How many of its steps were skipped?",
        "explain_run",
        lambda r: (r["skipped"]["count"], r["skipped"]["of_steps"]),
        (34, 40),
        {"run_id": 1},
    ),
    Task(
        "From which step on is its loss not finite?",
        "explain_run",
        lambda r: r["nonfinite_losses"]["first_step"],
        7,
        {"run_id": 1},
    ),
    Task(
        "Is a lower learning rate suggested, and from which checkpoint?",
        "explain_run",
        lambda r: _actions(r)[LOWER]["from_step"],
        5,
        {"run_id": 1},
    ),
    Task("Is anything wrong with run 2?", "explain_run", _findings, [], {"run_id": 2}),
    Task(
        "What was the last loss of run 2?",
        "series",
        lambda r: r["series"]["loss"]["value"][-1],
        1.0,
        {"run_id": 2, "names": ["loss"]},
    ),
    Task(
        "What accuracy did run 2 reach?",
        "series",
        lambda r: r["series"]["val/accuracy"]["value"],
        [0.9],
        {"run_id": 2, "names": ["val/accuracy"]},
    ),
    Task(
        "In which settings do runs 1 and 2 differ?",
        "compare",
        lambda r: r["differences"],
        {"training.learning_rate": [0.5, 0.1], "scaler.floor": [0.0, None]},
        {"run_ids": [1, 2]},
    ),
    Task(
        "Which recipes can I train?",
        "recipes",
        lambda r: [recipe["name"] for recipe in r["recipes"]],
        ["digits"],
    ),
    Task(
        "What would the lower learning rate change?",
        "explain_run",
        lambda r: _actions(r)[LOWER]["settings"],
        {"training.learning_rate": 0.05},
        {"run_id": 1},
    ),
]


@pytest.fixture
def client(database: Database, address: str, token: str, ada: User) -> Iterator[Client]:
    """A client of a server with a diverged run, a healthy one and a failed one."""
    offer(database, bf16=True)
    fall(database, ada, rate=0.5)
    training = {**CONFIG["training"], "learning_rate": 0.1}
    for name in ("good", "broken"):
        run = start_run(database, ada, name=name, config=CONFIG | {"training": training})
        if name == "good":
            record(database, run, make_steps([1.0] * 9), events=[make_metric(9, 0.9)])
        with database.writing() as session:
            end = partial(queue.end, session, run.id, run.attempt)
            if name == "good":
                end(Status.FINISHED)
            else:
                end(Status.FAILED, failure_kind="code", error="RuntimeError: no such file")
    with Client(address, token) as client:
        yield client


def test_tasks(client: Client) -> None:
    """A single call answers each task."""
    assert len(TASKS) == 20
    server = server_of(client, allow_writes=True)
    answers = {
        each.question: each.answer(call(server, each.tool, **each.arguments)) for each in TASKS
    }
    assert answers == {each.question: each.expected for each in TASKS}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_fix_is_queued_once_the_person_confirms(client: Client, mode: str) -> None:
    """Once the user confirms, a fix is queued from the finding's checkpoint, with the parent's
    other settings.
    """
    server = server_of(client, allow_writes=True)
    questions = []

    def agree(text: str) -> bool:
        questions.append(text)
        return True

    for person in (None, lambda _text: False):
        with pytest.raises(LookupError, match="Nothing was queued"):
            call(server, "queue_fix", person, mode=mode, run_id=1, action=LOWER)
    assert len(list(client.runs())) == 3
    queued = call(server, "queue_fix", agree, mode=mode, run_id=1, action=LOWER)
    assert "from run 1's checkpoint at step 5" in questions[0]
    assert '{"training.learning_rate": 0.05}' in questions[0]
    run = client.run(queued["id"])
    assert (run["status"], run["parent_id"], run["parent_step"]) == ("queued", 1, 5)
    assert run["config"]["training"]["learning_rate"] == 0.05
    assert run["config"]["scaler"] == client.run(1)["config"]["scaler"]
    again = "Start again with precision bf16"
    queued = call(server, "queue_fix", agree, mode=mode, run_id=1, action=again)
    run = client.run(queued["id"])
    assert (run["parent_id"], run["precision"]) == (None, "bf16")
    with pytest.raises(LookupError, match="action is 'reboot'; allowed: '"):
        call(server, "queue_fix", agree, mode=mode, run_id=1, action="reboot")
