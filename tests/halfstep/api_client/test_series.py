"""Series of a run by the client and by the command."""

import csv
import json
from typing import Any

import numpy as np
import pytest

from app.telemetry.metric_names import MOST_SHOWN
from db.database import Database
from db.runs import runs
from db.tables import Run, Status, User
from halfstep import Client
from halfstep.api_client.series import of_metrics, of_steps
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED, UNKNOWN_NORM
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.halfstep.api_client.conftest import STEPS
from tests.site import type_command
from tests.spool_made import checkpoint_of


def test_every_step_is_an_element(client: Client) -> None:
    """A series has every step as recorded, including infinities, or a range of them."""
    series = client.series(1)
    assert series["loss"].step.tolist() == list(range(1, STEPS + 1))
    expected = 1 / np.arange(1, STEPS + 1, dtype=np.float64)
    expected[9] = np.inf
    assert series["loss"].value == pytest.approx(expected, rel=1e-6)
    assert set(series) >= {"scale", "lr", "grad_norm", "elapsed_ms", "flags"}
    assert series["flags"].value[9] == SKIPPED | NONFINITE_LOSS
    assert client.series(1, first=5, last=8)["lr"].step.tolist() == [5, 6, 7, 8]


def test_points_are_a_charts(client: Client) -> None:
    """A series with fewer points than steps includes the extremes."""
    loss = client.series(1, points=32)["loss"]
    assert 2 < len(loss.step) < STEPS
    assert loss.value[0] == 1
    assert list(client.metrics(1, points=32)) == ['a "b",\u2028c']


def test_metrics_come_by_name(client: Client) -> None:
    """A metric of any name can be read, and NaN stays NaN."""
    [(name, line)] = client.metrics(1).items()
    assert name == 'a "b",\u2028c'
    assert line.step.tolist() == [0, 40]
    assert line.value == pytest.approx([1.5, np.nan], nan_ok=True)


def test_a_table_of_arrow_has_the_columns(client: Client) -> None:
    """A PyArrow table has one row per step, with NaN for missing values."""
    table = client.series(1).arrow()
    assert table.num_rows == STEPS
    assert table.column("loss")[0].as_py() == 1


def test_events_and_findings_are_the_apis(client: Client) -> None:
    """Events and findings are those of the API; the command prints a skip with its culprits."""
    [event] = client.events(1)
    assert (event["kind"], event["step"], event["culprits"]) == ("skip", 10, [{"name": "w"}])
    assert client.findings(1) == client._get("/api/v1/runs/1/findings")["findings"]


def test_pieces_may_end_anywhere() -> None:
    """The stream can be cut at any byte."""
    text = "step,loss\n1,0.5\n2,NaN\n3,Infinity\n"
    whole = of_steps([text], 1, np.inf)["loss"]
    cut = of_steps(list(text), 1, np.inf)["loss"]
    assert cut.value == pytest.approx([0.5, np.nan, np.inf], nan_ok=True)
    assert whole.step.tolist() == cut.step.tolist() == [1, 2, 3]
    assert of_steps(["step,loss\n"], 1, np.inf)["loss"].step.tolist() == []
    metrics = 'name,step,value,elapsed_ms\n"a\nb",1,2.5,3\n'
    assert of_metrics(list(metrics), 0, np.inf)["a\nb"].value.tolist() == [2.5]


def test_the_commands_print_them(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands print series as CSV, or as a JSON object per line."""
    type_command("run", "series", "1", "--last", "2")
    heads, first, *more = capsys.readouterr().out.splitlines()
    assert dict(zip(heads.split(","), first.split(","), strict=True))["loss"] == "1.0"
    assert len(more) == 1
    type_command("run", "series", "1", "--metrics", "--json")
    result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert result[1] == {"step": 40, 'a "b",\u2028c': "NaN"}
    type_command("run", "events", "1")
    assert capsys.readouterr().out.split()[-6:] == ["10", "skip", "2^10", "→", "2^9", "w"]
    type_command("run", "findings", "1", "--json")
    said = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in said] == client.findings(1)


@pytest.mark.parametrize("points", [(), ("--points", "32")])
def test_the_command_prints_nan_and_leaves_unknown_numbers_empty(
    client: Client,
    database: Database,
    running: Run,
    capsys: pytest.CaptureFixture[str],
    points: tuple[str, ...],
) -> None:
    """A NaN norm is printed, and an unknown one is empty, or null in JSON."""
    steps = make_steps([0.5, 0.5], first=STEPS + 1)
    for name in ("grad_norm", "grad_norm_clipped"):
        steps[name] = np.nan
    steps["flags"][1] |= UNKNOWN_NORM
    record(database, running, steps)
    command = ("run", "series", "1", "--first", str(STEPS + 1), *points)
    type_command(*command)
    rows = csv.DictReader(capsys.readouterr().out.splitlines())
    assert [row["grad_norm"] for row in rows] == ["NaN", ""]
    type_command(*command, "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["grad_norm"] for line in lines] == ["NaN", None]


def test_a_scale_is_requested(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """A new loss scale is requested once, and only from a running run."""
    type_command("run", "scale", "1", "2^12")
    assert "2^12" in capsys.readouterr().out
    statuses: list[dict[str, Any]] = client.run(1)["statuses"]
    assert "requested a loss scale of 2^12" in statuses[-1]["reason"]


def test_ada_forks(client: Client, database: Database, ada: User) -> None:
    """A fork has its parent's configuration with the given changes.

    The command says what to pass if there are no steps beyond the checkpoint.
    """
    from db.files import checkpoints

    file = {"kind": "checkpoint", "path": "", "size_bytes": 1, "sha256": "0" * 64}
    with database.writing() as session:
        for step in (100, 200):
            event = {"step": step, "reason": "end", "request": None, "files": [file]}
            checkpoints.publish(session, 1, 1, checkpoint_of(event), [f"key-{step}"])
    fork = client.fork(1, {"training": {"steps": 500}}, name="on")
    assert (fork["parent_id"], fork["parent_step"], fork["name"]) == (1, 200, "on")
    config = client.run(fork["id"])["config"]
    assert (config["training"]["steps"], config["training"]["batch_size"]) == (500, 64)
    assert client.fork(1, step=100)["parent_step"] == 100
    refused = type_command("run", "fork", "1", "--set", "training.steps=200")
    assert "allowed: more; pass --set training.steps=" in str(refused)
    client.cancel(1)
    with database.writing() as session:
        runs.set_status(session, runs.get(session, 1), Status.CANCELLED)
    continued = client.continue_run(1)
    assert (continued["parent_step"], continued["name"]) == (200, client.run(1)["name"])


def test_metrics_of_many_names_come_in_pages(
    database: Database, running: Run, client: Client
) -> None:
    """The client returns all metrics; a chart requests a page, a search or names."""
    names = [f"layer{number:03d}" for number in range(MOST_SHOWN + 20)]
    record(database, running, events=[make_metric(1, 0.5, name) for name in names])
    every = ['a "b",\u2028c', *names]
    assert list(client.metrics(running.id, points=32)) == every
    page = client.chart(running.id)
    assert (list(page["metrics"]), page["metrics_next"]) == (every[:MOST_SHOWN], every[99])
    some = client.chart(running.id, metric_search="layer11", metrics=[names[3]])
    assert list(some["metrics"]) == [names[3], *names[110:120]]
