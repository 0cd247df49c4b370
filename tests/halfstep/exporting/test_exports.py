"""Exports for other loggers, read by their own readers and by ours."""

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from db.database import Database
from db.tables import Run
from halfstep import Client
from halfstep.exporting.points import points_of
from halfstep.importing import mlflow, tensorboard
from halfstep.importing.source import Point, SourceRun
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from tests.db.telemetry.telemetry_made import record
from tests.halfstep.api_client.conftest import STEPS
from tests.site import type_command

NAMES = {"loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "skipped"}


def export(target: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert type_command("export", target, "1", str(folder), "--json") == 0
    return Path(json.loads(capsys.readouterr().out)["folder"])


def lines(found: SourceRun) -> dict[str, list[Point]]:
    result: dict[str, list[Point]] = {}
    for point in found.points():
        result.setdefault(point.name, []).append(point)
    return result


def test_tensorboard_reads_it(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's reader finds every step, the metric and the description."""
    place = export("tensorboard", tmp_path / "logs", capsys)
    read = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    assert {*read.Tags()["scalars"]} == {*NAMES, 'a "b",\u2028c'}
    losses = read.Scalars("loss")
    assert [each.step for each in losses] == list(range(1, STEPS + 1))
    assert losses[9].value == np.inf
    assert [each.step for each in read.Scalars("skipped") if each.value] == [10]
    [words] = read.Tensors("run/text_summary" if "run" not in read.Tags()["tensors"] else "run")
    assert b"digits" in words.tensor_proto.string_val[0]
    [found] = tensorboard.runs(tmp_path / "logs")
    assert isinstance(found, SourceRun)
    assert len(lines(found)["scale"]) == STEPS


@pytest.mark.parametrize("target", ["tensorboard", "mlflow"])
def test_a_folder_whose_name_is_not_utf8_is_rejected(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """A folder whose name is not UTF-8 is rejected with the reason, and nothing is written."""
    assert type_command("export", target, "1", str(tmp_path / "caf\udce9")) == 2
    assert "is not valid; allowed: UTF-8" in capsys.readouterr().err
    assert not list(tmp_path.glob("caf*"))


def test_what_is_unknown_is_not_exported(
    client: Client, database: Database, recorded: Run, tmp_path: Path
) -> None:
    """A gradient norm that was not logged has no exported point."""
    row = LoggedRow.of(STEPS + 1, 1, {"loss": 0.5})
    assert row is not None
    record(database, recorded, rows_of([row]))
    points = [point for point in points_of(client, client.run(1)) if point.step == STEPS + 1]
    assert {point.name for point in points} == {"loss", "scale", "skipped"}


def test_mlflows_folder_has_it(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our MLflow reader finds the exported run; names that MLflow rejects are changed."""
    place = export("mlflow", tmp_path / "mlruns", capsys)
    [found] = mlflow.runs(tmp_path)
    assert isinstance(found, SourceRun)
    run = client.run(1)
    assert (found.name, found.project) == (run["name"], "digits")
    assert found.config["training"]["steps"] == 400
    result = lines(found)
    assert {*result} == {*NAMES, "a _b___c"}
    assert [each.value for each in result["a _b___c"]] == pytest.approx([1.5, np.nan], nan_ok=True)
    assert result["loss"][9].value == np.inf
    assert result["loss"][0].time == pytest.approx(run["started_at"], abs=0.01)
    assert (place / "tags" / "halfstep.run").read_text() == "1"
    assert "already exists" in str(type_command("export", "mlflow", "1", str(tmp_path / "mlruns")))


def test_a_name_may_be_a_folder_too(tmp_path: Path) -> None:
    """Metrics `loss` and `loss/train` are exported in either order; no name leaves the folder."""
    from halfstep.exporting.mlflow import _Files

    with _Files(tmp_path / "a") as files:
        for name in ("loss", "loss/train", "../../out", "val/x", "val"):
            files.of(name).write("1 2 3\n")
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert written == {"a", "a/loss", "a/loss_train_", "a/out", "a/val", "a/val/x", "a/val_"}
