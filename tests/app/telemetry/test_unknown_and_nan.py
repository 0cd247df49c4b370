"""Wherever a run's numbers are shown, an unknown number is "–" and a NaN is a value."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.live.run_updates import of_run
from db.database import Database
from db.settings import Settings
from db.tables import Run
from halfstep.cli import formats
from halfstep.telemetry.flags import UNKNOWN_LOSS, UNKNOWN_NORM
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from halfstep.telemetry.plain_json import JsonObject
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def _tile(page: str, label: str) -> str:
    tiles = re.findall(r"<dt>(.*?)</dt><dd class=\"value\"[^>]*>(.*?)</dd>", page, re.S)
    [value] = {text for name, text in tiles if label in name}
    return re.sub(r"<[^>]*>", "", value).strip()


def _export(browser: TestClient, name: str) -> list[dict[str, str]]:
    text = browser.get(f"/api/v1/runs/1/export/{name}.csv").text
    return list(csv.DictReader(io.StringIO(text)))


def test_a_norm_that_nobody_measured_is_unknown(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A run without gradient norms shows no NaN norm on the tile or in the CSV."""
    logged = [LoggedRow.of(step, step, {"loss": 0.5}) for step in (1, 2)]
    record(database, running, rows_of([row for row in logged if row]))
    assert _tile(browser.get("/runs/1").text, "Gradient norm") == "–"
    assert [row["grad_norm"] for row in _export(browser, "steps")] == ["", ""]


def test_a_nan_is_a_value_everywhere(database: Database, running: Run, browser: TestClient) -> None:
    """A NaN loss, gradient norm or metric is NaN on tiles, tables, CSV, API and command line."""
    steps = make_steps([1.0, math.nan])
    steps["grad_norm"][-1] = steps["grad_norm_clipped"][-1] = np.nan
    record(database, running, steps, events=[make_metric(2, math.nan, "val/loss")])
    page = browser.get("/runs/1").text
    for label in ("Training loss", "Gradient norm", "val/loss"):
        assert _tile(page, label) == "NaN"
    last = _export(browser, "steps")[-1]
    assert (last["loss"], last["grad_norm"]) == ("NaN", "NaN")
    assert _export(browser, "metrics")[-1]["value"] == "NaN"
    run = browser.get("/api/v1/runs/1").json()
    assert run["loss"] == "NaN"
    assert formats.loss(run) == "NaN"
    assert browser.get("/api/v1/runs?limit=5").json()["runs"][0]["loss"] == "NaN"
    [metric] = browser.get("/api/v1/runs/1/metrics/summary").json()["metrics"]
    assert metric["value"] == "NaN"
    figures = browser.get("/api/v1/comparison?runs=1").json()["runs"][0]["figures"]
    assert (figures["loss"]["value"], figures["val/loss"]["value"]) == ("NaN", "NaN")
    metrics = browser.get("/api/v1/runs/1/metrics").json()["metrics"]
    assert [metric["value"] for metric in metrics] == ["NaN"]
    assert browser.get("/api/v1/runs/1/flagged").json()["loss"] == ["NaN"]


def _read_chart(
    settings: Settings, database: Database, browser: TestClient
) -> Iterator[JsonObject]:
    """Yield the values of the first run's series, from the API and from the live stream."""
    page = browser.get("/api/v1/runs/1/series").json()
    lines = {**page["series"], **page["metrics"]}
    yield {name: line["y"] for name, line in lines.items()}
    compared = "/api/v1/comparison/series?runs=1&series=loss&series=grad_norm"
    series = browser.get(compared).json()["runs"]["1"]["series"]
    yield {name: series[name]["y"] for name in ("loss", "grad_norm")}
    update = of_run(database, settings, 1)("")
    assert update is not None
    message = json.loads(update.data)
    metrics = [metric["value"] for metric in message["metrics"]]
    yield {**message["steps"], **({"val/loss": metrics} if metrics else {})}


def test_charts_get_nan_as_a_value(
    settings: Settings, database: Database, running: Run, browser: TestClient
) -> None:
    """Charts and live streams have a NaN of a loss, a norm and a metric alike."""
    values = [1.0, math.nan, math.inf, -math.inf]
    steps = make_steps(values)
    for name in ("grad_norm", "grad_norm_clipped"):
        steps[name] = values
    events = [make_metric(step, value, "val/loss") for step, value in enumerate(values, 1)]
    record(database, running, steps, events=events)
    texts = [1.0, "NaN", "Infinity", "-Infinity"]
    for lines in _read_chart(settings, database, browser):
        for name in lines.keys() & {"loss", "grad_norm", "grad_norm_clipped", "val/loss"}:
            assert lines[name] == texts, name
        assert None not in lines["loss"]


def test_charts_get_what_is_unknown_as_null(
    settings: Settings, database: Database, running: Run, browser: TestClient
) -> None:
    """Norms and learning rates that were not logged, and unobserved losses, are null in charts."""
    logged = [LoggedRow.of(step, step, {"loss": 0.5}) for step in (1, 2)]
    rows = rows_of([row for row in logged if row])
    rows["loss"][1], rows["flags"][1] = math.nan, UNKNOWN_LOSS | UNKNOWN_NORM
    record(database, running, rows)
    for lines in _read_chart(settings, database, browser):
        assert lines["loss"] == [0.5, None]
        for name in lines.keys() & {"grad_norm", "grad_norm_clipped", "lr"}:
            assert lines[name] == [None, None], name


def test_buckets_count_nonfinite_values_and_not_unknown_ones(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A bucket of a series counts its non-finite values, but not unknown ones."""
    steps = make_steps([1.0] * 1000, skipped=[100])
    steps["loss"][99] = steps["loss"][499] = math.nan
    steps["grad_norm"][[99, 499]] = steps["grad_norm_clipped"][[99, 499]] = math.inf
    for name in ("grad_norm", "grad_norm_clipped"):  # no gradient was observed in a step
        steps[name][199] = math.nan
    steps["flags"][199] |= UNKNOWN_NORM
    steps["loss"][299] = math.nan
    steps["flags"][299] |= UNKNOWN_LOSS
    value = {99: math.inf, 500: math.nan}
    events = [make_metric(step, value.get(step, 1.0), "val/loss") for step in range(1000)]
    record(database, running, steps, events=events)
    page = browser.get("/api/v1/runs/1/series?points=64").json()
    assert page["bucket"] > 1
    lines = {**page["series"], **page["metrics"]}
    some = {name: line["nonfinite"] for name, line in lines.items() if line["nonfinite"]}
    assert some.keys() == {"loss", "grad_norm", "grad_norm_clipped", "val/loss"}
    assert {ticks["total"] for ticks in some.values()} == {2}
    assert lines["loss"]["nonfinite"]["steps"] == [100, 500]
    raw = browser.get("/api/v1/runs/1/series?last=20").json()["series"]
    assert {line["nonfinite"] for line in raw.values()} == {None}


def test_a_loss_that_was_not_observed_is_unknown(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A loss that was not observed is "–", null or an empty cell."""
    steps = make_steps([math.nan])
    steps["flags"] |= UNKNOWN_LOSS
    record(database, running, steps)
    assert _tile(browser.get("/runs/1").text, "Training loss") == "–"
    run = browser.get("/api/v1/runs/1").json()
    assert (run["loss"], formats.loss(run)) == (None, "–")
    assert _export(browser, "steps")[0]["loss"] == ""


@pytest.mark.parametrize(("loss", "text"), [(None, "NaN"), (0.5, "0.5"), ("Infinity", "∞")])
def test_the_command_reads_servers_of_earlier_versions(loss: float | str | None, text: str) -> None:
    """The command reads the NaN of earlier servers, which send null with a flag."""
    run = {"loss": loss, "is_loss_nonfinite": loss != 0.5}
    assert formats.loss(run) == text  # type: ignore[arg-type]
