"""A number that is unknown is "–", and a NaN is a value, wherever a run's numbers are shown."""

import csv
import io
import math
import re

import numpy as np
import pytest
from fastapi.testclient import TestClient

from db.database import Database
from db.tables import Run
from halfstep.cli import formats
from halfstep.telemetry.flags import UNKNOWN_LOSS
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def _tile(page: str, label: str) -> str:
    tiles = re.findall(r"<dt>(.*?)</dt><dd class=\"value\"[^>]*>(.*?)</dd>", page, re.S)
    [value] = {text for name, text in tiles if label in name}
    return re.sub(r"<[^>]*>", "", value).strip()


def _exported(browser: TestClient, name: str) -> list[dict[str, str]]:
    text = browser.get(f"/api/v1/runs/1/export/{name}.csv").text
    return list(csv.DictReader(io.StringIO(text)))


def test_a_norm_that_nobody_measured_is_unknown(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Numbers that a script only logs have no gradient norm: no NaN on the tile or in the CSV."""
    logged = [LoggedRow.of(step, step, {"loss": 0.5}) for step in (1, 2)]
    record(database, running, rows_of([row for row in logged if row]))
    assert _tile(browser.get("/runs/1").text, "Gradient norm") == "–"
    assert [row["grad_norm"] for row in _exported(browser, "steps")] == ["", ""]


def test_a_nan_is_a_value_everywhere(database: Database, running: Run, browser: TestClient) -> None:
    """Loss, gradient norm and a metric that are NaN are so on tiles, tables, CSV, API and CLI."""
    steps = make_steps([1.0, math.nan])
    steps["grad_norm"][-1] = steps["grad_norm_clipped"][-1] = np.nan
    record(database, running, steps, events=[make_metric(2, math.nan, "val/loss")])
    page = browser.get("/runs/1").text
    for label in ("Training loss", "Gradient norm", "val/loss"):
        assert _tile(page, label) == "NaN"
    last = _exported(browser, "steps")[-1]
    assert (last["loss"], last["grad_norm"]) == ("NaN", "NaN")
    assert _exported(browser, "metrics")[-1]["value"] == "NaN"
    run = browser.get("/api/v1/runs/1").json()
    assert run["loss"] == "NaN"
    assert formats.loss(run) == "NaN"
    assert browser.get("/api/v1/runs?limit=5").json()["runs"][0]["loss"] == "NaN"
    [metric] = browser.get("/api/v1/runs/1/metrics/summary").json()["metrics"]
    assert metric["value"] == "NaN"
    figures = browser.get("/api/v1/comparison?runs=1").json()["runs"][0]["figures"]
    assert (figures["loss"]["value"], figures["val/loss"]["value"]) == ("NaN", "NaN")


def test_a_loss_that_was_not_observed_is_unknown(
    database: Database, running: Run, browser: TestClient
) -> None:
    """It is "–" and null, and an empty cell."""
    steps = make_steps([math.nan])
    steps["flags"] |= UNKNOWN_LOSS
    record(database, running, steps)
    assert _tile(browser.get("/runs/1").text, "Training loss") == "–"
    run = browser.get("/api/v1/runs/1").json()
    assert (run["loss"], formats.loss(run)) == (None, "–")
    assert _exported(browser, "steps")[0]["loss"] == ""


@pytest.mark.parametrize(("loss", "text"), [(None, "NaN"), (0.5, "0.5"), ("Infinity", "∞")])
def test_the_command_reads_servers_of_earlier_versions(loss: float | str | None, text: str) -> None:
    """They have a NaN as null, with a flag."""
    run = {"loss": loss, "is_loss_nonfinite": loss != 0.5}
    assert formats.loss(run) == text  # type: ignore[arg-type]
