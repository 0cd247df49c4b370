"""`import halfstep as wandb`, in scripts written like W&B's documentation."""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import halfstep
from db.database import Database
from db.telemetry import step_rows
from halfstep.session import active_run, run_start, run_upload, watched_run
from halfstep.session.logged_values import files_of
from halfstep.telemetry.run_folder import read_run
from halfstep.wandb_compat import calls, unsupported
from tests import preloaded
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.halfstep.watching.watch_made import Written
from tests.site import until


@pytest.fixture(autouse=True)
def beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, no earlier messages, and no run after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(unsupported._messages, "_printed", {})
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "WANDB_TAGS", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    halfstep.finish()
    if active_run.active is not None:
        active_run.active.finish()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all packages but those of the wheel."""
    monkeypatch.setattr(watched_run, "find_spec", lambda name: None)


def read_written(name: str) -> Written:
    return Written(Path("halfstep-runs") / name)


def read_logged(name: str) -> dict[str, list[tuple[int, Any]]]:
    """Return the numbers of a run, by name."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in read_written(name).of("metric"):
        found.setdefault(event["name"], []).append((event["step"], event["value"]))
    return found


def table(name: str, key: str) -> list[dict[str, str]]:
    [path] = (Path("halfstep-runs") / name).rglob(f"{key}.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def histogram(name: str, key: str) -> dict[str, Any]:
    [path] = (Path("halfstep-runs") / name).rglob(f"{key}.histogram.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def outcome(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (Path("halfstep-runs") / name / "outcome-1.json").read_text()
    )
    return found


def test_a_plain_loop() -> None:
    """In W&B's quickstart with a scaler, logged values are at the observed steps."""
    wandb: Any = halfstep
    wandb.login()
    run = wandb.init(
        entity="ada",
        project="digits",
        name="plain",
        tags=["fp16"],
        config=argparse.Namespace(learning_rate=0.01, epochs=2, seed=2**64 - 1),
    )
    config = wandb.config
    torch.manual_seed(config.seed)
    model = torch.nn.Linear(4, 1)
    wandb.watch(model, torch.nn.MSELoss(), log="all", log_freq=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for epoch in range(config.epochs):
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            wandb.log({"loss": loss, "epoch": epoch})
        run.log({"val": {"accuracy": 0.5 + epoch / 4}})
    wandb.finish()
    assert halfstep.run is None
    described = read_run(Path("halfstep-runs/plain"))
    settings = {"learning_rate": 0.01, "epochs": 2, "seed": str(2**64 - 1)}
    assert described.config == settings
    assert (described.project, described.tags) == ("digits", ["fp16"])
    steps = read_written("plain").steps
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    numbers = read_logged("plain")
    assert [step for step, _ in numbers["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in numbers["loss"]] == pytest.approx(steps["loss"].tolist())
    assert numbers["val.accuracy"] == [(3, 0.5), (6, 0.75)]
    assert outcome("plain")["status"] == "finished"


def test_labels_can_be_set_later(without_torch: None) -> None:
    """A name, a note and tags that the script sets later replace its earlier ones."""
    wandb: Any = halfstep
    run = wandb.init(project="digits", name="cold", tags=["a"])
    wandb.run.name = "warm"
    run.tags += ("b",)
    run.notes = "first try"
    run.notes += ", better"
    wandb.log({"loss": 1.0})
    wandb.finish()
    assert (run.name, run.tags, run.notes) == ("warm", ("a", "b"), "first try, better")
    renamed, tagged, noted, again = read_written("cold").of("described")
    assert (renamed["name"], renamed["before"]) == ("warm", {"name": "cold", "tags": ["a"]})
    assert tagged["tags"] == ["a", "b"]
    assert (noted["note"], again["note"]) == ("first try", "first try, better")
    assert again["before"] == {"name": "warm", "note": "first try", "tags": ["a", "b"]}


def test_an_entry_deleted_from_the_summary_is_not_logged() -> None:
    """An entry deleted from the summary is not logged, and other entries are."""
    wandb: Any = halfstep
    wandb.init(name="deleted")
    wandb.summary.update({"best": 3, "draft": 1})
    del wandb.summary["draft"]
    wandb.finish()
    assert read_logged("deleted") == {"summary/best": [(0, 3.0)]}
    assert {row["name"] for row in table("deleted", "summary")} == {"best"}


def test_tables_images_and_a_summary(
    without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Media are stored as files; the summary has `define_metric`'s values and the script's own."""
    wandb: Any = halfstep
    run = wandb.init(project="digits", name="media", config={"lr": 0.1}, notes="first try")
    wandb.define_metric("epoch")
    wandb.define_metric("val/*", step_metric="epoch")
    wandb.define_metric("loss", summary="min")
    wandb.define_metric("acc", summary="best", goal="maximize")
    wandb.define_metric("acc", summary="mean")
    predictions = wandb.Table(columns=["id", "label"])
    for epoch in range(4):
        wandb.log({"loss": abs(epoch - 2), "acc": epoch / 4}, commit=False)
        wandb.log({"epoch": epoch})
        predictions.add_data(epoch, f"digit {epoch}")
    picture = wandb.Image(np.full((4, 6), 0.5), caption="a digit")
    wandb.log({"examples": [picture, wandb.Image(np.zeros((2, 2, 3), np.uint8))]})
    wandb.log({"predictions": predictions, "weights": wandb.Histogram([1, 2, 2, 3], num_bins=2)})
    wandb.log({"activations": np.arange(10.0), "note": "text"})
    Path("a.mp4").write_bytes(b"video")
    wandb.log({"clip": wandb.Video("a.mp4", caption="a clip"), "missing": wandb.Video("b.mp4")})
    wandb.log({"page": wandb.Html("<p>here</p>"), "shape": wandb.Molecule("a.pdb")})
    wandb.log({"bars": wandb.plot.bar(predictions, "label", "id"), "beep": wandb.Audio([0.0], 8)})
    wandb.log({"uneven": wandb.Histogram(np_histogram=([1, 3], [0, 1, 10]))})
    wandb.run.summary["best_epoch"] = 2
    wandb.alert(title="Low", text="accuracy is low", level=wandb.plot.scatter)
    Path("model.bin").write_bytes(b"weights")
    assert wandb.save("*.bin") == ["model.bin"]
    artifact = wandb.Artifact("model", type="model")
    artifact.add_file("model.bin")
    run.log_artifact(artifact).wait()
    wandb.config.update({"lr": 0.2}, allow_val_change=True)
    wandb.config.momentum = 0.9
    wandb.finish()

    numbers = read_logged("media")
    rows = read_written("media").steps
    assert rows["step"].tolist() == [1, 2, 3, 4]
    assert rows["loss"].tolist() == [2.0, 1.0, 0.0, 1.0]
    assert numbers["epoch"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    for each, value in {"best_epoch": 2, "loss.min": 0, "acc.max": 0.75, "acc.mean": 0.375}.items():
        assert numbers[f"summary/{each}"] == [(11, value)]  # the last call
    summary = {row["name"]: row["value"] for row in table("media", "summary")}
    assert summary["loss"] == "min 0.0"
    assert summary["acc"] == "max 0.75, mean 0.375"
    assert summary["best_epoch"] == "2"
    assert table("media", "predictions")[3] == {"id": "3", "label": "digit 3"}
    assert histogram("media", "weights")["counts"] == [1, 3]
    assert histogram("media", "weights")["highest"] == 3.0
    assert sum(histogram("media", "activations")["counts"]) == 10
    assert [row["count"] for row in table("media", "uneven")] == ["1", "3"]
    files = {path.name for path in Path("halfstep-runs/media/artifacts").rglob("*.*")}
    assert files >= {"examples-0.png", "examples-1.png", "examples-0.caption.txt", "note.txt"}
    assert files >= {"clip.mp4", "clip.caption.txt", "page.html", "bars.plot.json", "beep.wav"}
    [version] = read_written("media").of("saved_artifact")
    assert (version["name"], version["type"]) == ("model", "model")
    assert not read_written("media").of("checkpoint")
    assert "model.bin" in files
    assert read_run(Path("halfstep-runs/media")).config == {"lr": 0.2, "momentum": 0.9}
    note, axes = read_written("media").of("described")
    assert (note["note"], axes["step_metrics"]) == ("first try", {"val/*": "epoch"})
    said = capsys.readouterr().err
    assert "Molecule is not supported" in said
    assert "missing is not logged: " in said
    assert "alert: Low: accuracy is low" in said


def test_logged_losses_are_the_steps_of_a_script_without_torch(without_torch: None) -> None:
    """Losses logged without torch become steps with rate and norm, and can be continued."""
    wandb: Any = halfstep
    for attempt in range(2):
        run = wandb.init(name="rows", id="rows", resume="allow")
        assert run.step == 3 * attempt
        if attempt == 0:
            wandb.log({"val/acc": 0.5}, commit=False)
        for number in range(3):
            wandb.log({"train/loss": 3.0 - number, "lr": 0.5, "grad_norm": np.float32(2)})
        wandb.finish()
    rows = read_written("rows").steps
    assert rows["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["loss"].tolist() == [3.0, 2.0, 1.0] * 2
    assert set(rows[["lr", "grad_norm", "grad_norm_clipped"]].tolist()) == {(0.5, 2.0, 2.0)}
    assert rows["elapsed_ms"].tolist() == sorted(rows["elapsed_ms"])
    assert read_logged("rows") == {"val/acc": [(1, 0.5)]}


def test_a_run_with_only_a_loss_continues_after_its_last_step(without_torch: None) -> None:
    """A later attempt replaces no number logged after the last loss."""
    wandb: Any = halfstep
    for attempt in range(2):
        wandb.init(name="goes on", id="goes-on", resume="allow")
        wandb.log({"loss": 1.0})
        for number in range(3):
            wandb.log({"acc": number + 3 * attempt})
        wandb.finish()
    assert read_written("goes-on").steps["step"].tolist() == [1, 5]
    assert read_logged("goes-on")["acc"] == [(2, 0), (3, 1), (4, 2), (6, 3), (7, 4), (8, 5)]


def test_a_number_that_is_too_large_costs_no_other(without_torch: None) -> None:
    """A number beyond a float's range affects no other value, nor the step of a loss."""
    wandb: Any = halfstep
    wandb.init(name="large")
    wandb.log({"loss": 1.5, "grad_norm": 10**400, "a": Fraction(10**400), "b": 2})
    wandb.log({"loss": np.float32(2.5), "lr": True})
    wandb.finish()
    assert read_written("large").steps[["step", "loss"]].tolist() == [(1, 1.5), (2, 2.5)]
    assert read_logged("large")["b"] == [(1, 2)]


def test_losses_that_a_script_with_torch_logs_are_no_steps() -> None:
    """Losses logged by a script with torch, before or during its training, make no steps."""
    wandb: Any = halfstep
    wandb.init(name="before")
    weight = torch.nn.Parameter(torch.ones(1))
    for number in range(3):
        wandb.log({"loss": float(number)})
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        loss = weight.square().sum()
        wandb.log({"loss": loss.item()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wandb.finish()
    assert read_written("before").steps["step"].tolist() == [1, 2, 3]
    assert len(read_logged("before")["loss"]) == 6


def test_a_metric_has_the_x_axis_that_is_defined_for_it(without_torch: None) -> None:
    """A metric's defined x axis is logged with each value, unless the script logs it."""
    wandb: Any = halfstep
    run = wandb.init(name="axes", config={"lr": 0.1})
    samples = wandb.define_metric("samples")
    run.define_metric("val/*", step_metric="epoch")
    wandb.define_metric("train/loss", step_metric=samples)
    for epoch in range(2):
        for batch in range(2):
            wandb.log({"train/loss": 1.0, "samples": 32 * (2 * epoch + batch + 1)})
        wandb.log({"epoch": epoch}, commit=False)
        wandb.log({"val/loss": 0.5})
        wandb.log({"val/accuracy": 0.9, "other": 1})
    wandb.finish()
    numbers = read_logged("axes")
    assert numbers["epoch"] == [(2, 0.0), (3, 0.0), (6, 1.0), (7, 1.0)]
    assert numbers["samples"] == [(0, 32.0), (1, 64.0), (4, 96.0), (5, 128.0)]
    assert [step for step, _ in numbers["val/accuracy"]] == [3, 7]
    assert read_run(Path("halfstep-runs/axes")).config == {"lr": 0.1}
    defined = read_written("axes").of("described")[-1]["step_metrics"]
    assert defined == {"val/*": "epoch", "train/loss": "samples"}


def test_artifacts_are_versions_that_other_runs_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_torch: None
) -> None:
    """Artifacts of files and folders are versions, which other runs use by W&B's names."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    wandb: Any = halfstep
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text("one")
    with wandb.init(project="digits", name="maker", mode="offline") as run:
        artifact = wandb.Artifact("data", type="dataset", metadata={"rows": 1})
        artifact.add_dir("raw", name="train")
        with artifact.new_file("notes/about.txt", mode="w") as file:
            file.write("made here")
        assert run.log_artifact(artifact, aliases=["good"]).wait() is artifact
        wandb.log_artifact("raw/a.csv", name="table", type="dataset")
        run.log_model("raw/a.csv", name="weights")
    with wandb.init(project="digits", name="user", mode="offline") as run:
        used = run.use_artifact("team/digits/data:good", type="dataset")
        folder = Path(used.download())
        assert (folder / "train" / "a.csv").read_text() == "one"
        assert (folder / "notes" / "about.txt").read_text() == "made here"
        copied = used.get_path("train/a.csv").download(root=tmp_path / "copy")
        assert Path(copied).read_text() == "one"
        assert Path(wandb.use_model("weights")).read_text() == "one"
        with pytest.raises(wandb.Error, match="there is no"):
            wandb.use_artifact("digits/data:v9")
    names = [event["name"] for event in read_written("maker").of("saved_artifact")]
    assert names == ["data", "table", "weights"]
    assert [event["name"] for event in read_written("user").of("used_artifact")] == [
        "data",
        "weights",
    ]


def test_references_of_an_artifact_are_refused_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], without_torch: None
) -> None:
    """References in an artifact are refused once; its files are logged, if it has any."""
    wandb: Any = halfstep
    (tmp_path / "a.csv").write_text("one")
    with wandb.init(project="digits", name="maker", mode="offline") as run:
        for name, files in (("bucket", []), ("mixed", ["a.csv"])):
            artifact = wandb.Artifact(name, type="dataset")
            for number in range(3):
                artifact.add_reference(f"s3://data/{number}.bin", name=f"{number}.bin")
            for file in files:
                artifact.add_file(file)
            assert run.log_artifact(artifact).wait() is artifact
    [version] = read_written("maker").of("saved_artifact")
    assert (version["name"], len(version["files"])) == ("mixed", 1)
    printed = capfd.readouterr().err
    assert printed.count("add_reference() is not supported and is ignored") == 2
    assert printed.count("has only references") == 1


def test_several_runs_of_a_sweep(without_torch: None) -> None:
    """Each `with wandb.init()` is a run of its own, also after one that raises."""
    wandb: Any = halfstep
    with pytest.raises(
        wandb.Error, match="no server is configured"
    ):  # else nothing would be trained
        wandb.sweep({"method": "grid", "parameters": {"lr": {"values": [1]}}}, project="digits")
    for rate in (0.1, 0.2, 0.3):
        try:
            with wandb.init(project="digits", config={"lr": rate}, name=f"lr-{rate}") as run:
                assert wandb.run is run
                for step in range(0, 30, 10):
                    run.log({"score": run.config["lr"] * step}, step=step)
                run.log({"score": 9.0}, step=5)
                if rate == 0.2:
                    raise ValueError("it diverged")
        except ValueError:
            continue
    assert wandb.run is None
    assert [read_logged(f"lr-{rate}")["score"][2] for rate in (0.1, 0.3)] == [(20, 2.0), (20, 6.0)]
    assert read_logged("lr-0.1")["score"][3] == (5, 9.0)  # W&B drops a step that goes back
    assert outcome("lr-0.1")["status"] == "finished"
    assert outcome("lr-0.2")["status"] == "failed"
    assert "it diverged" in outcome("lr-0.2")["error"]
    first = wandb.init(name="again")
    assert wandb.init(name="other") is first
    assert first.path == first.id
    second = wandb.init(name="other", reinit=True)
    assert outcome("again")["status"] == "finished"
    second.finish(exit_code=3)
    assert outcome("other")["status"] == "failed"


def test_a_script_without_finish_loses_nothing(tmp_path: Path) -> None:
    """A script without `finish` loses no values, summary or saved files, even if it raises."""
    code = """
import halfstep as wandb
wandb.init(name="unfinished")
open("model.bin", "w").write("weights")
wandb.save("model.bin")
wandb.log({"acc": 0.5}, commit=False)
wandb.summary["best"] = 3
raise ValueError("it diverged")
"""
    ended = preloaded.run([sys.executable, "-c", code])
    assert ended.stderr.count("halfstep:") == 1, ended.stderr
    assert read_logged("unfinished") == {"acc": [(0, 0.5)], "summary/best": [(0, 3.0)]}
    assert {row["name"] for row in table("unfinished", "summary")} == {"acc", "best"}
    assert 7 in [event["size_bytes"] for event in read_written("unfinished").of("artifact")]
    assert outcome("unfinished")["status"] == "failed"


def test_a_later_cell_of_a_notebook_starts_a_run_of_its_own(
    without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook `init` after an ended cell starts another run; elsewhere this is reported."""
    wandb: Any = halfstep
    first = wandb.init(name="cell 1")
    assert wandb.init(name="cell 2") is first
    assert "call `finish()` before starting another run" in capsys.readouterr().err
    assert first._watch._run
    first._watch._run.outcome._cells.has_ended = True
    wandb.log({"acc": 0.5}, commit=False)
    second = wandb.init(name="cell 2")
    assert second is not first
    assert wandb.run is second
    assert read_logged("cell-1") == {"acc": [(0, 0.5)]}
    assert outcome("cell-1")["status"] == "interrupted"


def test_a_run_that_only_logs_continues(without_torch: None) -> None:
    """A run that only logs is continued by its id, with W&B's step counter."""
    for attempt in (1, 2):
        with halfstep.init(id="abc", resume="allow") as run:
            assert run.resumed == (attempt == 2)
            for _ in range(3):
                run.log({"score": attempt})
    assert read_logged("abc")["score"] == [(step, 1 + step // 3) for step in range(6)]
    [resumed] = read_written("abc").of("resumed")
    assert (resumed["step"], resumed["exact"]) == (2, True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_before", [True, False])
def test_log_without_step_follows_the_one_with_it(first: int, is_before: bool) -> None:
    """A log call without a step uses the last explicit one, also if steps are counted from 0."""
    wandb: Any = halfstep
    wandb.init(name="counted")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(first, first + 6):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if is_before:
            wandb.log({"train/loss": loss}, step=step)
        optimizer.step()
        if not is_before:
            wandb.log({"train/loss": loss}, step=step)
        if step % 3 == 2:
            wandb.log({"accuracy": 0.5})
    wandb.log({"epoch": 1}, step=1)  # in another unit
    wandb.log({"test": 0.5})
    wandb.finish()
    numbers = read_logged("counted")
    assert [step for step, _ in numbers["train/loss"]] == [*range(first, first + 6)]
    assert [step for step, _ in numbers["accuracy"]] == [2, 5]
    assert [step for step, _ in numbers["test"]] == [6]


def test_steps_that_a_script_runs_again_are_replaced(without_torch: None) -> None:
    """After a resume, steps from the first logged one on are replaced."""
    wandb: Any = halfstep
    wandb.init(id="again", resume="allow")
    for step in range(1, 11):
        wandb.log({"loss": 1.0 / step, "acc": step}, step=step)
    wandb.finish()
    run = wandb.init(id="again", resume="must")
    assert run.step == 10
    for step in range(7, 13):
        wandb.log({"loss": 10.0 + step, "acc": 100 + step}, step=step)
        assert run.step == step
    wandb.finish()
    steps = list(range(1, 11)) + list(range(7, 13))
    assert read_written("again").steps["step"].tolist() == steps
    assert read_logged("again")["acc"][-6:] == [(step, 100 + step) for step in range(7, 13)]
    [resumed] = read_written("again").of("resumed")
    assert (resumed["step"], resumed["exact"]) == (6, False)


def test_steps_run_again_are_replaced_on_the_server(
    database: Database,
    server: dict[str, str],
    without_torch: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server replaces steps that a second attempt repeats after other numbers."""
    wandb: Any = halfstep
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    for run_id, has_epoch in (("again", False), ("epochs", True)):
        for first, offset in ((1, 0), (7, 100)):
            wandb.init(id=run_id, resume="allow")
            if has_epoch:
                wandb.log({"epoch": first}, step=first)
            for step in range(first, 11):
                wandb.log({"loss": offset + step, "acc": offset + step}, step=step)
            wandb.finish()

    def accuracies() -> list[float]:
        with database.reading() as session:
            return [point.value for point in read_logged_points(session, name="acc")]

    expected = [*range(1, 7), *range(107, 111)] * 2
    until(lambda: accuracies() == expected)
    with database.reading() as session:
        rows = [row for run in (1, 2) for row in step_rows.read_rows(session, run, most=100)]
    assert [row.loss for row in rows] == expected


def test_numbers_without_a_loss_are_logged_again(without_torch: None) -> None:
    """A later attempt's numbers replace its own steps; others stay, such as those by epoch."""
    wandb: Any = halfstep
    for first in (0, 5):
        wandb.init(id="numbers", resume="allow")
        for step in range(first, 10):
            wandb.log({"acc": first + step}, step=step)
            wandb.log({"loss": float(first)}, step=step + 1)
        wandb.finish()
    [resumed] = read_written("numbers").of("resumed")
    assert (resumed["step"], resumed["exact"]) == (10, True)
    assert read_written("numbers").steps["step"].tolist() == [*range(1, 11), *range(6, 11)]


def test_resume_must_and_never_are_honoured(
    beginning: Path, without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """resume="must" and "never" are checked before anything is written."""
    wandb: Any = halfstep
    with pytest.raises(wandb.Error, match="there is no such run"):
        wandb.init(id="my run", resume="must")
    assert not Path("halfstep-runs").exists()
    assert wandb.run is None
    wandb.init(id="my run", resume="never").finish()
    with pytest.raises(wandb.errors.UsageError, match="exists"):
        wandb.init(id="my run", resume="never")
    with wandb.init(id="my run", resume="must") as run:
        assert run.resumed
    assert "continues" not in capsys.readouterr().err
    with wandb.init(id="my run") as run:
        assert run.resumed
    assert "init(id='my run') continues the run in" in capsys.readouterr().err


def test_a_change_of_the_configuration_is_refused_or_reported(
    without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changing a configuration value requires allow_val_change; setting an equal one does not."""
    wandb: Any = halfstep
    wandb.init(id="abc", config={"lr": 0.1, "betas": (0.9, 0.99)}).finish()
    with pytest.raises(wandb.Error, match=r"lr is 0\.1, not 0\.2"):
        wandb.init(id="abc", resume="allow", config={"lr": 0.2}, allow_val_change=False)
    settings = {"lr": 0.1, "betas": (0.9, 0.99)}
    with wandb.init(id="abc", resume="allow", config=settings, allow_val_change=False) as run:
        assert run.resumed
        run.config.lr = 0.1
        run.config.seed = 1
        with pytest.raises(wandb.Error, match="seed is 1, not 2"):
            run.config.seed = 2
        run.config.update({"seed": 3}, allow_val_change=True)
        assert run.config.seed == 3
    assert "is changed" not in capsys.readouterr().err
    with wandb.init(id="abc", resume="allow", config={"lr": 0.3}) as run:
        assert run.config.lr == 0.3
        with pytest.raises(wandb.Error, match="lr is"):
            run.config.update({"lr": 0.4}, allow_val_change=False)
    assert "config.lr is changed" in capsys.readouterr().err


def test_a_run_knows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has the address that `init` prints, and none offline."""
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "token")
    page = "http://127.0.0.1:9/runs/7"
    monkeypatch.setattr(run_upload.uploader, "start", lambda *_: page)
    monkeypatch.setattr(run_upload.uploader, "is_uploading", lambda _: True)
    with halfstep.init(name="sent") as run:
        assert (run.url, run.get_url()) == (page, page)
    with halfstep.init(name="kept", mode="offline") as run:
        assert run.url is None


def test_a_continued_run_keeps_its_configuration() -> None:
    """A continued run keeps its configuration except for new values."""
    halfstep.init(id="abc", config={"lr": 0.1, "seed": 1}).finish()
    with halfstep.init(id="abc", resume="allow", config={"lr": 0.2}) as run:
        assert (run.config.lr, run.config.seed) == (0.2, 1)
        run.config.epochs = 3
    described = json.loads(Path("halfstep-runs/abc/run.json").read_text())
    assert described["config"] == {"lr": 0.2, "seed": 1, "epochs": 3}


def test_an_undeliverable_alert_is_kept(
    without_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert of a process whose stderr is closed is sent later."""
    wandb: Any = halfstep
    wandb.init(name="silent")
    monkeypatch.setattr("sys.stderr", None)
    wandb.alert("Low")
    wandb.finish()
    assert [event["title"] for event in read_written("silent").of("alert")] == ["Low"]


def test_an_alert_is_sent_once_a_while(
    without_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alerts of the same title are sent once within their time, a minute by default."""
    wandb: Any = halfstep
    run = wandb.init(name="alerts")
    moments = iter([0.0, 30.0, 59.0, 61.0, 62.0])
    with monkeypatch.context() as patch:
        patch.setattr(watched_run, "clock", lambda: next(moments))
        run.alert("Low", "0.4", level=wandb.AlertLevel.WARN)
        run.alert("Low", "0.3", level=wandb.AlertLevel.WARN)
        run.alert("NaN", level="ERROR", wait_duration=timedelta(seconds=1))
        run.alert("Low", "0.2")
        run.alert("NaN", "loss", "error")
    wandb.finish()
    sent = [
        (event["title"], event["text"], event["level"])
        for event in read_written("alerts").of("alert")
    ]
    assert sent[:2] == [("Low", "0.4", "warn"), ("NaN", "", "error")]
    assert sent[2:] == [("Low", "0.2", "info"), ("NaN", "loss", "error")]


def test_a_run_has_its_address_at_once(
    without_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server responds a run's address is one that redirects to its page."""
    monkeypatch.setattr(run_upload, "PAGE_SECONDS", 0.01)
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "none")
    wandb: Any = halfstep
    run = wandb.init(project="digits", name="early")
    identifier = read_run(Path("halfstep-runs/early")).id
    assert run.url == f"http://127.0.0.1:9/runs/watched/{identifier}"
    assert (run.id, run.path) == (identifier[:8], f"digits/{run.id}")


def test_tensorflows_writers_are_said_to_be_left_out(
    without_torch: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that imported TensorFlow is told how to import its event files."""
    wandb: Any = halfstep
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    wandb.init(name="board", sync_tensorboard=True)
    wandb.finish()
    assert "`halfstep import tensorboard FOLDER` imports it" in capsys.readouterr().err


def test_tensorboards_values_are_the_runs(without_torch: None) -> None:
    """Values of TensorBoard's writers are logged at their steps, each under its own name."""
    wandb: Any = halfstep
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    tensorboardX = pytest.importorskip("tensorboardX")  # noqa: N806 - its name
    wandb.init(name="board", sync_tensorboard=True)
    with tensorboard.SummaryWriter("logs/train") as writer:
        for step in range(3):
            writer.add_scalar("loss", 1.0 / (step + 1), step)
        writer.add_scalars("both", {"a": 1.0, "b": 2.0}, 5)
        writer.add_scalar("new", 7.0, 6, new_style=True)
        writer.add_image("digit", np.zeros((1, 4, 4), np.uint8), 2)
        writer.add_text("remark", "it **works**", 2)
        writer.add_histogram("weights", np.arange(10.0), 2)
    with tensorboardX.SummaryWriter("logs/val") as writer:
        writer.add_scalar("loss", 0.5, 4)
    wandb.finish()
    with tensorboard.SummaryWriter("logs/late") as writer:
        writer.add_scalar("late", 0.5, 4)
    rows = read_written("board").steps
    assert rows[["step", "loss"]].tolist() == [(1, 0.5), (2, pytest.approx(1 / 3))]
    assert read_logged("board") == {
        "loss": [(0, 1.0)],
        "both_a/both": [(5, 1.0)],
        "both_b/both": [(5, 2.0)],
        "new": [(6, 7.0)],
        "val/loss": [(4, 0.5)],
    }
    files = {path.name for path in Path("halfstep-runs/board/artifacts").rglob("*.*")}
    assert {"digit.png", "remark.txt", "weights.csv"} <= files


def test_nothing_raises(without_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    """No unsupported, misordered or invalid call of a script raises."""
    wandb: Any = halfstep
    wandb.log({"early": 1})
    wandb.save("x")
    wandb.define_metric("loss")
    wandb.alert("nobody")
    wandb.init(name="wrong", tags=5).finish()
    wandb.config.lr = 0.1
    wandb.summary["x"] = 1
    run = wandb.init(mode="sideways", config="a string", resume="allow", settings=wandb.Settings())
    assert run.config.lr == 0.1
    run.log("no mapping")
    run.log({"object": object(), "image": wandb.Image("no-such.png"), 3: 4})
    run.whatever.deep(1)["key"].more()
    run.log({"loss": 1}, step="two")
    assert not wandb.Api().runs("ada/digits")
    wandb.watch(None)
    run.finish()
    run.finish()
    run.log({"late": 1})
    said = capsys.readouterr().err
    for words in (
        "without init()",
        "mode='sideways'",
        "log() failed",
        "Api is not supported",
        "run.whatever",
    ):
        assert words in said, words
    assert read_logged(run.name)["3"] == [(0, 4.0)]


def test_one_value_that_cannot_be_shown_costs_no_other(without_torch: None) -> None:
    """A value that cannot be shown costs no other value or file of the same step."""
    wandb: Any = halfstep
    wandb.init(name="all")
    wandb.log({"names": np.array(["cat", "dog"]), "loss": 1.5})
    wandb.alert("Low", "accuracy", level=wandb.AlertLevel.WARN)
    for name in ("a/config.yaml", "b/config.yaml", "train.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    wandb.save("*/config.yaml")
    wandb.save("train.py")
    with pytest.raises(wandb.errors.CommError):
        raise wandb.CommError
    wandb.finish()
    assert read_written("all").steps[["step", "loss"]].tolist() == [(1, 1.5)]
    saved = {each["name"]: each["path"] for each in read_written("all").of("artifact")}
    for name, content in {
        "a.config.yaml": "a/config.yaml",
        "b.config.yaml": "b/config.yaml",
        "train.py": "train.py",
    }.items():
        assert (Path("halfstep-runs/all") / saved[name]).read_text() == content


class Figure:
    """A figure with matplotlib's methods, which is also its own axes."""

    def get_figure(self) -> "Figure":
        return self

    def savefig(self, file: Any, format: str) -> None:  # noqa: A002 - matplotlib's word
        PIL.Image.new("RGB", (5, 4)).save(file, format)


def test_figures_of_matplotlib_are_pictures(without_torch: None) -> None:
    """A matplotlib figure, its axes and `pyplot` are logged as PNG."""
    wandb: Any = halfstep
    figure = Figure()
    axes = SimpleNamespace(get_figure=lambda: figure)
    pyplot = SimpleNamespace(gcf=lambda: figure, savefig=None)
    wandb.init(name="figures")
    wandb.log({"figure": figure, "axes": axes, "pyplot": pyplot})
    wandb.finish()
    files = {path.name for path in Path("halfstep-runs/figures/artifacts").rglob("*.png")}
    assert files == {"figure.png", "axes.png", "pyplot.png"}


def test_points_in_space_are_a_figure(
    without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point clouds and scenes are 3D figures; boxes and mesh files are reported in a line."""
    wandb: Any = halfstep
    wandb.init(name="space")
    scene = {"points": np.zeros((2, 6)), "boxes": [{"corners": []}]}
    wandb.log({"cloud": wandb.Object3D.from_numpy(np.eye(3)), "scene": wandb.Object3D(scene)})
    wandb.log({"mesh": wandb.Object3D("mesh.glb", caption="a mesh")})
    wandb.finish()
    files = {path.name: path for path in Path("halfstep-runs/space/artifacts").rglob("*.json")}
    assert set(files) == {"cloud.plot.json", "scene.plot.json"}
    assert json.loads(files["cloud.plot.json"].read_text())["data"][0]["x"] == [1.0, 0.0, 0.0]
    said = capsys.readouterr().err
    assert "the boxes are not shown" in said
    assert "mesh is not logged: ValueError: mesh.glb is a file; allowed: an array" in said


def test_arguments_of_later_versions_are_ignored(
    without_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A media class reports an unknown argument of a later W&B, and the value is logged."""
    wandb: Any = halfstep
    wandb.init(name="later")
    wandb.log({"image": wandb.Image(np.zeros((2, 2)), shade="dark")})
    wandb.log({"page": wandb.Html("<p>here</p>", caption="a page", theme="dark")})
    wandb.log({"animation": wandb.Html(Figure())})
    wandb.finish()
    files = {path.name for path in Path("halfstep-runs/later/artifacts").rglob("*.*")}
    assert {"image.png", "page.html", "page.caption.txt"} <= files
    said = capsys.readouterr().err
    assert "Image(shade=…) is not supported" in said
    assert "Html(theme=…) is not supported" in said
    assert "animation is not logged: TypeError: a document is of type Figure" in said


def test_names_of_wandb_raise_nothing() -> None:
    """A public name of W&B that is not supported does nothing and raises nothing."""
    wandb: Any = halfstep
    for name in ("ArtifactTTL", "link_model", "tensorboard", "termsetup", "xgboost"):
        assert not getattr(wandb, name)


def test_each_run_of_a_script_without_torch_has_the_steps_that_it_logs(tmp_path: Path) -> None:
    """A script without torch gets steps from logged losses, even if another run used torch."""
    code = """
import halfstep as wandb
for name in ("first", "second"):
    wandb.init(name=name)
    for loss in (3.0, 2.0):
        wandb.log({"loss": loss})
    wandb.finish()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("first", "second"):
        assert read_written(name).steps[["step", "loss"]].tolist() == [(1, 3.0), (2, 2.0)]


def test_a_disabled_run_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """WANDB_MODE=disabled disables the run."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run: Any = halfstep.init(config={"lr": 1})
    run.log({"loss": 1})
    assert run.config.lr == 1
    assert run.disabled
    halfstep.finish()
    assert not Path("halfstep-runs").exists()


def test_our_own_watch_stays_ours() -> None:
    """Without `init` the name `watch` is Halfstep's own."""
    assert halfstep.watch is run_start.watch
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = halfstep.nothing_of_ours


def test_functions_of_the_module_have_the_parameters_of_the_runs_methods() -> None:
    """Functions of the module have the parameters and help of the run's methods, without `self`."""
    for name, function in calls.RUN_FUNCTIONS.items():
        method = getattr(calls.Run, name)
        assert list(signature(function).parameters) == list(signature(method).parameters)[1:]
        assert function.__doc__ == method.__doc__


def test_images_and_tables_are_values_of_watch_log_too() -> None:
    """`halfstep.Image` and `halfstep.Table` can be logged by `watch.log`, also in table cells."""
    pixels = np.zeros((2, 2), np.uint8)
    image = halfstep.Image(pixels)
    assert files_of("sample", image) == files_of("sample", pixels)
    rows = [{"label": "cat", "image": pixels}]
    table = halfstep.Table(columns=["label", "image"], data=[["cat", image]])
    assert files_of("table", table) == files_of("table", rows)
    assert files_of("table", [{"label": "cat", "image": image}]) == files_of("table", rows)


def test_code_is_saved(beginning: Path) -> None:
    """`log_code` saves code, with W&B's filter functions of a path, or of path and root."""
    (beginning / "model.py").write_text("x = 1\n")
    (beginning / "notes.txt").write_text("text\n")
    (beginning / "old.py").write_text("x = 0\n")
    run = halfstep.init(project="it", name="coded", mode="offline")
    saved = run.log_code(
        ".",
        include_fn=lambda path: path.endswith((".py", ".txt")),
        exclude_fn=lambda path, root: Path(path).name == "old.py" and Path(root) == beginning,
    )
    assert (saved.type, saved.files) == ("code", 2)
    assert halfstep.log_code().files == 2
    assert halfstep.log_code(str(beginning / "none")) is None
