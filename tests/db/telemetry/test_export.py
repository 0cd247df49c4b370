"""Exports: all recorded data, in formats that other tools read."""

import csv
import io
import math
from typing import Any

import pytest
from pyarrow import parquet

from db.database import Database
from db.tables import Run
from db.telemetry import export
from halfstep.api_client import series
from halfstep.telemetry.spool import UNKNOWN_US
from tests.db.telemetry.telemetry_made import make_events, make_metric, make_steps, record


@pytest.fixture
def recorded(database: Database, running: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of 25 steps, 2 skips and 3 metrics, exported in pages of 7 rows."""
    monkeypatch.setattr(export, "PAGE_ROWS", 7)
    losses = [float(step) for step in range(1, 26)]
    losses[4], losses[5] = math.nan, -math.inf
    skips = make_events([3, 20])
    skips[0]["culprits"] = [{"name": "model.0.weight"}, {"name": "model.0.bias"}]
    metrics = [make_metric(step, step / 25) for step in (10, 20)]
    metrics.append(make_metric(25, "NaN", "run/gap"))
    record(database, running, make_steps(losses, skipped=[3, 20]), events=[*skips, *metrics])
    return running


def read_csv(database: Database, run: Run, name: str) -> list[dict[str, str]]:
    text = b"".join(export.as_csv(database, run.id, name)).decode()
    return list(csv.DictReader(io.StringIO(text)))


def read_parquet(database: Database, run: Run, name: str) -> list[dict[str, Any]]:
    data = b"".join(export.as_parquet(database, run.id, name))
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(data)).to_pylist()
    return rows


def test_csv_has_every_step(database: Database, recorded: Run) -> None:
    """CSV has all steps in order over many pages, with non-finite numbers by name."""
    rows = read_csv(database, recorded, "steps")
    assert [int(row["step"]) for row in rows] == list(range(1, 26))
    assert [row["loss"] for row in rows[3:7]] == ["4.0", "NaN", "-Infinity", "7.0"]
    assert [row["grad_norm_clipped"] for row in rows[:4]] == ["2.0", "3.0", "Infinity", "3.0"]
    assert [row["step"] for row in rows if int(row["flags"]) & 1] == ["3", "20"]


def test_parquet_has_the_same_steps(database: Database, recorded: Run) -> None:
    """Parquet has the same steps with exact numbers and NaN."""
    rows = read_parquet(database, recorded, "steps")
    result = read_csv(database, recorded, "steps")
    assert list(rows[0]) == list(result[0])
    assert len(rows) == 25
    for row, words in zip(rows, result, strict=True):
        for name, value in row.items():
            assert value == float(words[name]) or (math.isnan(value) and words[name] == "NaN")


def test_events_bring_their_culprits(database: Database, recorded: Run) -> None:
    """Both formats have every scaler event with its culprits' names."""
    result, rows = (
        read_csv(database, recorded, "events"),
        read_parquet(database, recorded, "events"),
    )
    assert [(row["step"], row["kind"]) for row in rows] == [
        *((3, "backoff"), (3, "skip"), (20, "backoff"), (20, "skip"))
    ]
    assert rows[1]["culprits"] == ["model.0.weight", "model.0.bias"]
    assert result[1]["culprits"] == "model.0.weight model.0.bias"
    assert result[1]["scale_after"] == str(2.0**19)


def test_no_cell_is_a_formula(database: Database, running: Run) -> None:
    """A CSV name that looks like a formula is text; Parquet has the names unchanged."""
    formulas = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"]
    metrics = [make_metric(1, -2.5, name) for name in [*formulas, "val/loss"]]
    record(database, running, make_steps([-1.0]), events=metrics)
    result = {row["name"]: row["value"] for row in read_csv(database, running, "metrics")}
    assert result == {
        **dict.fromkeys((f"'{name}".replace("\r", " ") for name in formulas), "-2.5"),
        "val/loss": "-2.5",
    }
    kept = {row["name"] for row in read_parquet(database, running, "metrics")}
    assert kept == {*formulas, "val/loss"}
    assert read_csv(database, running, "steps")[0]["loss"] == "-1.0"


def test_metrics_come_by_name(database: Database, recorded: Run) -> None:
    """Both formats have every metric in order of name and step."""
    rows = read_parquet(database, recorded, "metrics")
    assert [(row["name"], row["step"]) for row in rows] == [
        *(("run/gap", 25), ("val/accuracy", 10), ("val/accuracy", 20))
    ]
    assert [row["value"] for row in read_csv(database, recorded, "metrics")] == [
        "NaN",
        "0.4",
        "0.8",
    ]


@pytest.mark.parametrize("name", export.EXPORTS)
def test_run_without_rows_gives_an_empty_table(database: Database, running: Run, name: str) -> None:
    """A run without rows exports a CSV with a header only, and a readable Parquet file."""
    assert read_csv(database, running, name) == []
    assert read_parquet(database, running, name) == []


def test_the_data_wait_of_a_step_is_a_number_or_unknown(database: Database, running: Run) -> None:
    """An unknown data wait is an empty cell in CSV, null in Parquet and NaN in arrays."""
    steps = make_steps([1.0] * 3)
    steps["data_us"][0] = UNKNOWN_US
    record(database, running, steps)
    assert [row["data_us"] for row in read_csv(database, running, "steps")] == ["", "80", "120"]
    assert [row["data_us"] for row in read_parquet(database, running, "steps")] == [None, 80, 120]
    text = b"".join(export.as_csv(database, running.id, "steps")).decode()
    waits = series.of_steps([text], 1, 3)["data_us"].value
    assert (math.isnan(waits[0]), waits[1:].tolist()) == (True, [80, 120])
