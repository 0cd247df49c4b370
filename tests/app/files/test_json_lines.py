"""Numbers of a watched run as JSON lines, on both databases."""

import json
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st
from starlette.testclient import TestClient

from app.files.json_lines import MOST_LINES
from app.http import rate_limit
from app.http.rate_limit import RateLimit, RateLimited
from db.database import Database
from db.tables import User
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from tests.app.uploading import write_token
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.marks import looped

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def sender(stranger: TestClient, database: Database, ada: User) -> TestClient:
    """Return a client with a token that writes, and one run."""
    stranger.headers["Authorization"] = f"Bearer {write_token(database, ada)}"
    begin(stranger)
    return stranger


def begin(client: TestClient) -> int:
    """Begin a run and return its number; id and name are enough."""
    answer = client.post("/api/v1/ingest", json={"id": uuid.uuid4().hex, "name": "shell"})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["run"])


def log(client: TestClient, *lines: Any, run: int = 1) -> dict[str, Any]:
    """Send lines, given as objects or bytes; return the response."""
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    answer = client.post(f"/api/v1/ingest/{run}/log", content=b"\n".join(texts))
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def read_recorded(database: Database, run: int = 1) -> tuple[list[Any], list[Any]]:
    """Return the step rows and the metric points."""
    with database.reading() as session:
        rows = step_rows.read_rows(session, run, most=END)
        return (
            [(row.step, row.loss, row.lr) for row in rows],
            sorted(
                (point.step, point.name, point.value) for point in read_logged_points(session, run)
            ),
        )


def test_lines_are_rows_and_metrics(
    sender: TestClient, database: Database, script: TestClient
) -> None:
    """A logged loss and its learning rate become their step's row; repeating them adds nothing."""
    lines = [
        {"step": 0, "loss": 9.0, "val/accuracy": 0.1},
        {"step": 1, "train/loss": 2.0, "lr": 0.5},
        {"step": 2, "train/loss": "NaN", "lr": 0.25, "temperature": 40},
        {"step": 2.0, "val": {"accuracy": 0.5}},
    ]
    for _ in range(2):
        assert log(sender, *lines) == {"lines": 4, "problems": []}
        rows, points = read_recorded(database)
        assert [row[0::2] for row in rows] == [(1, 0.5), (2, 0.25)]
        assert points == [
            (0, "loss", 9.0),
            (0, "val/accuracy", 0.1),
            (2, "temperature", 40.0),
            (2, "val/accuracy", 0.5),
        ]
    run = script.get("/api/v1/runs/1").json()
    assert (run["step"], run["status"]) == (2, "running")
    assert sender.post("/api/v1/ingest/1/1/end", json={"status": "finished", "step": 2}).is_success
    assert sender.post("/api/v1/ingest/1/log", content=b'{"step": 3, "a": 1}').status_code == 409


@looped(
    "line, error",
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "allowed: an object"),
        ({"loss": 1.0}, "step is None; allowed: a whole number"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": 2**70}, "step is"),
        ({"step": 1, "time": "now"}, "time is 'now'"),
        ({"step": 1, "a": None}, "a is None; allowed: a number, or as text NaN, Inf"),
        ({"step": 1, "a": "text"}, "a is 'text'"),
        ({"step": 1, "a": {"b": [1]}}, "a/b is [1]"),
        ({"step": 1, "a": 10**400}, "a is"),
        ({"step": 1, "": 1}, "metric"),
        ({"step": 1, "x" * 201: 1}, "metric"),
    ],
)
@pytest.mark.one_database
def test_an_invalid_line_is_skipped(
    sender: TestClient, database: Database, line: Any, error: str
) -> None:
    """The error of an invalid line has its number, the field, the value and the allowed values."""
    answer = log(sender, {"step": 1, "b": 1.0}, b"", line, {"step": 2, "b": 2.0})
    [problem] = answer["problems"]
    assert problem["line"] == 3
    assert error in problem["error"]
    assert [point for point in read_recorded(database)[1] if point[1] == "b"] == [
        (1, "b", 1.0),
        (2, "b", 2.0),
    ]


def test_unusable_destinations_are_rejected(sender: TestClient, script: TestClient) -> None:
    """JSON lines above the limits, without a token or run, or for a run not watched are
    rejected.
    """
    address = "/api/v1/ingest/1/log"
    line = b'{"step": 1, "a": 1}\n'
    assert sender.post(address, content=line * (MOST_LINES + 1)).status_code == 422
    assert sender.post(address, content=b" " * (2**20 + 1)).status_code == 413
    assert sender.post("/api/v1/ingest/9/log", content=line).status_code == 404
    del sender.headers["Authorization"]
    assert sender.post(address, content=line).status_code == 401


def test_a_loss_of_an_earlier_step_is_named(sender: TestClient, database: Database) -> None:
    """A loss of an earlier step is reported, unless it repeats the recorded one."""
    log(sender, {"step": 5, "loss": 1.25}, {"step": 6, "loss": "NaN"})
    answer = log(
        sender,
        {"step": 5, "loss": 1.25},
        {"step": 6, "loss": "Infinity"},
        {"step": 3, "loss": 3.0, "lr": 0.1},
        {"step": 5, "loss": 1.5, "a": 1},
        {"step": 7, "loss": 1.0},
        {"step": 7, "train/loss": 2.0},
    )
    assert [problem["line"] for problem in answer["problems"]] == [3, 4, 6]
    assert "allowed: after 6" in answer["problems"][0]["error"]
    assert answer["lines"] == 3
    assert [row[0] for row in read_recorded(database)[0]] == [5, 6, 7]


@pytest.mark.parametrize(("first", "steps"), [(6, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 2, 3, 4])])
def test_a_second_attempt_continues_where_its_first_loss_is(
    sender: TestClient, database: Database, first: int, steps: list[int]
) -> None:
    """A second attempt replaces steps from its first loss on, and keeps earlier ones."""
    sent = {"id": uuid.uuid4().hex, "name": "twice"}
    run = sender.post("/api/v1/ingest", json=sent).json()["run"]
    log(sender, *({"step": step, "loss": 1.0, "a": step} for step in range(1, 6)), run=run)
    sender.post(f"/api/v1/ingest/{run}/1/end", json={"status": "finished", "step": 5})
    assert sender.post("/api/v1/ingest", json=sent | {"attempt": 2}).status_code == 200
    for step in (first, first + 1):
        assert log(sender, {"step": step, "loss": 2.0}, run=run) == {"lines": 1, "problems": []}
    rows, points = read_recorded(database, run)
    assert [row[0] for row in rows] == steps
    assert [row[1] for row in rows] == [1.0] * (first - 1) + [2.0] * 2
    assert [point[0] for point in points] == [*range(1, min(first, 6))]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.none())
)


@trying(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.dictionaries(
                st.sampled_from(["step", "time", "loss", "lr", "grad_norm", "loss_scale", "m"]),
                VALUES,
            ),
        ),
        max_size=8,
    )
)
@pytest.mark.slow
def test_no_lines_make_the_server_fail(
    sender: TestClient, script: TestClient, lines: list[Any]
) -> None:
    """Arbitrary JSON lines are recorded or reported, and the run's page still works."""
    run = begin(sender)
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    answer = sender.post(f"/api/v1/ingest/{run}/log", content=b"\n".join(texts))
    assert answer.status_code == 200, answer.text
    assert script.get(f"/runs/{run}").status_code == 200
    assert script.get(f"/api/v1/runs/{run}/series").status_code == 200


def test_a_token_has_a_limit_of_lines_per_minute(
    sender: TestClient, database: Database, ada: User
) -> None:
    """A token above its limit of lines gets 429 with the time to wait; other tokens are not
    limited.
    """
    limit = RateLimit(100, "JSON lines")
    sender.app.state.log_lines = limit  # type: ignore[attr-defined]
    lines = [{"step": step, "a": 1.0} for step in range(1, 61)]
    log(sender, *lines)
    more = b"\n".join(json.dumps({"step": step, "a": 1.0}).encode() for step in range(61, 121))
    refused = sender.post("/api/v1/ingest/1/log", content=more)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 12
    assert "100 JSON lines a minute per token" in refused.json()["detail"]
    assert len(read_recorded(database)[1]) == 60
    sender.headers["Authorization"] = f"Bearer {write_token(database, ada)}"
    assert sender.post("/api/v1/ingest/1/log", content=more).status_code == 200
    assert len(read_recorded(database)[1]) == 120


@pytest.mark.parametrize("spelling", ["bearer {}", "BEARER {}", "Bearer   {}", "Bearer {} "])
def test_a_spelling_of_the_header_is_no_other_client(sender: TestClient, spelling: str) -> None:
    """The line limit belongs to the token, however the Authorization header is spelled."""
    sender.app.state.log_lines = RateLimit(100, "JSON lines")  # type: ignore[attr-defined]
    token = sender.headers["authorization"].split()[1]
    body = b"\n".join(b'{"step": 1, "a": 1}' for _ in range(100))
    assert sender.post("/api/v1/ingest/1/log", content=body).status_code == 200
    headers = {"Authorization": spelling.format(token)}
    assert sender.post("/api/v1/ingest/1/log", content=body, headers=headers).status_code == 429


def test_empty_lines_count_towards_no_limit(sender: TestClient, database: Database) -> None:
    """Line ends and blank lines do not count towards the limit."""
    sender.app.state.log_lines = RateLimit(10, "JSON lines")  # type: ignore[attr-defined]
    for step in range(1, 11):
        log(sender, {"step": step, "a": 1.0}, b"", b"")
    assert len(read_recorded(database)[1]) == 10


def test_a_limit_passes_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity is restored over time, and one request above the limit passes after a pause."""
    moment = 0.0
    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: moment)
    limit = RateLimit(60, "lines")
    limit.take("a", 100)
    with pytest.raises(RateLimited) as refused:
        limit.take("a", 30)
    assert refused.value.seconds == 70
    moment = 70.0
    limit.take("a", 30)
    RateLimit(0, "lines").take("a", 10**9)


def numbers(lost: Any, **others: float) -> list[Any]:
    """Return lines of 300 steps without gradient norms, with the given line in place of one."""
    sound = {"loss": 0.5, "lr": 0.1} | others
    return [lost if step == lost["step"] else {"step": step} | sound for step in range(1, 301)]


def findings(sender: TestClient, script: TestClient) -> list[dict[str, Any]]:
    """End the run and return its findings."""
    end = {"status": "finished", "step": 300}
    assert sender.post("/api/v1/ingest/1/1/end", json=end).is_success
    return list(script.get("/api/v1/runs/1/findings").json()["findings"])


def test_a_loss_that_is_not_finite_once_is_named_at_its_step(
    sender: TestClient, script: TestClient
) -> None:
    """A finding names the step of a single non-finite loss; later finite losses show that the
    weights are still finite.
    """
    log(sender, *numbers({"step": 200, "loss": "NaN", "lr": 0.1}))
    [finding] = findings(sender, script)
    assert finding["title"] == "The loss was not finite at step 200"
    assert "step 201" in finding["text"]
    assert "consequence" not in finding["text"]


def test_a_loss_that_stays_lost_is_named_from_its_first_step_on(
    sender: TestClient, script: TestClient
) -> None:
    """The finding has the first step of a lasting NaN; an unknown norm before it is no NaN."""
    lost = [{"step": step, "loss": "NaN", "lr": 0.1} for step in range(200, 301)]
    log(sender, *numbers(lost[0])[:200], *lost[1:])
    [finding] = findings(sender, script)
    assert finding["title"] == "The loss is not finite from step 200 on"


def test_unknown_norms_lose_no_weights(sender: TestClient, script: TestClient) -> None:
    """A scaled run whose last loss is NaN is not dead if no gradient norm was logged."""
    lost = {"step": 300, "loss": "NaN", "loss_scale": 1024}
    log(sender, *numbers(lost, loss_scale=1024))
    [run] = script.get("/api/v1/runs").json()["runs"]
    assert run["health"]["word"] != "dead"
