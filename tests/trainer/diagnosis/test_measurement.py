"""Runs that measure instead of training: precision plans, and diffs of checkpoints."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select

from db.queue import run_control
from db.runs import runs
from db.tables import CheckpointFile, Diagnosis, Status
from halfstep.precision_lab.plan_event import event_of, plan_from
from halfstep.run_config import ConfigError, parse_config
from halfstep.telemetry.event_codec import fields_of, parse
from halfstep.telemetry.events import PrecisionDiff, PrecisionPlan
from tests.site import Site
from tests.trainer.conftest import CPU, Regression
from tests.trainer.data.test_loader import Reading, Streaming
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.diagnosis.measurement import Measurement, measure
from trainer.recipes.digits import Digits

VALUES = {
    "precision": "fp16",
    "training": {"steps": 6, "batch_size": 8},
    "checkpoints": {"every_steps": 3},
    "evaluation": {"every_steps": None},
    "diagnosis": {"histogram_every_steps": 0},
}


def run_measurement(recipe: Any, values: dict[str, Any], files: Sequence[Path] = ()) -> list[Any]:
    """Run a measurement with checkpoints; return its events."""
    events: list[Any] = []
    config, checkpoints = parse_config(recipe, VALUES | values), {file.stem: file for file in files}
    measure(Measurement(recipe, config, CPU, checkpoints, {}, events.append))
    return events


def test_a_diff_at_a_checkpoint_is_of_the_next_step(tmp_path: Path, run_loop: Any) -> None:
    """Loss and scale of a diff at a checkpoint equal those of the training's next step."""
    run = run_loop(Regression, VALUES, tmp_path)
    files = sorted(tmp_path.glob("*.pt"))
    [diff] = run_measurement(Regression, {"lab": {"task": "precision_diff"}}, files[:1])
    assert isinstance(diff, PrecisionDiff)
    assert diff.step == 3
    [following] = run.records[run.records["step"] == 4]
    assert np.float32(diff.loss) == following["loss"]
    assert diff.scale == following["scale"]
    assert 0 < float(diff.error) < 0.01
    assert {row.name for row in diff.rows} >= {"model.0.weight"}
    assert {each.role for each in diff.causes} >= {"model.0", "model.2"}


class Augmented(Regression):
    """A recipe that augments each batch by random numbers."""

    def batch(self, indices: Any, generator: torch.Generator) -> Any:
        inputs, targets = super().batch(indices, generator)
        return inputs + torch.rand(inputs.shape, generator=generator), targets


BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "augmented": (Augmented, {}),
    "random offsets": (Augmented, {"seed": 5}),
    "examples": (Reading, {}),
    "stream": (Streaming, {}),
    "channels last": (Regression, {"channels_last": True}),
    "accumulated": (Augmented, {"accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_diff_is_of_the_batch_that_the_training_had_next(
    tmp_path: Path, run_loop: Any, name: str
) -> None:
    """A diff uses the batch and random numbers of the training's next step."""
    recipe, training = BATCHES[name]
    values = VALUES | {"precision": "bf16", "training": VALUES["training"] | training}
    seen: list[Any] = []

    class Seen(recipe):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:
            seen.append([each.clone() for each in batch])
            yield from super().training_step(batch)

    run = run_loop(Seen, values, tmp_path)
    passes = training.get("accumulation_steps", 1)
    trained = seen[3 * passes]
    seen.clear()
    file = tmp_path / "step-00000003.pt"
    [diff] = run_measurement(Seen, values | {"lab": {"task": "precision_diff"}}, [file])
    assert all(torch.equal(a, b) for a, b in zip(seen[0], trained, strict=True))
    assert diff.step == 3
    [following] = run.records[run.records["step"] == 4]
    assert passes > 1 or np.float32(diff.loss) == following["loss"]


def test_a_plan_is_of_the_first_batches_of_a_training(tmp_path: Path, run_loop: Any) -> None:
    """A plan uses the first batches of a training with the same augmentation."""
    seen: list[Any] = []

    class Seen(Augmented):
        def training_step(self, batch: Any) -> Any:
            seen.append(batch[0].clone())
            yield from super().training_step(batch)

    run_loop(Seen, VALUES, tmp_path)
    trained = seen[:2]
    seen.clear()
    run_measurement(Seen, {"lab": {"task": "precision_plan", "batches": 2}})
    assert all(any(torch.equal(each, one) for one in seen) for each in trained)


def test_diffs_are_made_at_several_checkpoints_or_with_initial_weights(
    tmp_path: Path, run_loop: Any
) -> None:
    """Each diff belongs to the step of its checkpoint; one without a checkpoint to step 0."""
    run_loop(Regression, VALUES, tmp_path)
    files = sorted(tmp_path.glob("*.pt"))
    values = {"lab": {"task": "precision_diff"}, "precision": "bf16"}
    assert [diff.step for diff in run_measurement(Regression, values, files)] == [3, 6]
    [fresh] = run_measurement(Regression, values)
    assert (fresh.step, fresh.scale, fresh.dtype) == (0, 1.0, "bfloat16")


def test_modules_keep_their_own_precision_in_a_diff() -> None:
    """In a diff a module in modules.fp32 is in fp32, and the others in the run's low precision."""
    own = {"lab": {"task": "precision_diff"}, "modules": {"fp32": ["model.2"]}}
    [diff] = run_measurement(Regression, own)
    dtypes = {row.name: row.dtype for row in diff.rows if row.direction == "forward"}
    assert (dtypes["model.0"], dtypes["model.2"]) == ("float16", "float32")


def test_a_plan_passes_through_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    """The page and the API rebuild the plan from its event, with infinite errors too. The log
    begins with what is measured, and ends with the plan.
    """
    [event] = run_measurement(Regression, {"lab": {"task": "precision_plan", "batches": 1}})
    assert isinstance(event, PrecisionPlan)
    plan = plan_from(event)
    assert plan.batches == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Measurement 1: batch 1 of 1, fresh weights"
    assert printed[-1] == plan.sentences()[-1]
    assert plan.best.config["precision"] in ("fp16", "bf16")
    point = plan.points[0].__class__(
        **{**vars(plan.points[0]), "error": math.inf, "by_weights": {"Infinity": math.inf}}
    )
    worse = plan.__class__(**{**vars(plan), "points": [point]})
    again = plan_from(parse(fields_of(event_of(worse))))  # type: ignore[arg-type]
    assert again == worse
    assert again.sentences() == worse.sentences()


def test_a_plan_without_weights_is_rejected() -> None:
    """A plan needs fresh weights or a checkpoint."""
    with pytest.raises(ConfigError, match="0 checkpoints without fresh weights"):
        run_measurement(Regression, {"lab": {"task": "precision_plan", "fresh_weights": False}})


def test_a_checkpoint_of_another_network_is_named(tmp_path: Path, run_loop: Any) -> None:
    """The error for a checkpoint of another network has the file, and why it does not fit."""
    run_loop(Regression, VALUES, tmp_path)
    file = min(tmp_path.glob("*.pt"))
    with pytest.raises(CheckpointError, match=r"step-00000003\.pt does not fit"):
        run_measurement(Digits, {"lab": {"task": "precision_diff"}}, [file])


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_diff_needs_half_precision(precision: str) -> None:
    """A diff of an fp32 run is refused before anything is queued."""
    with pytest.raises(
        ConfigError, match=f"precision is {precision}, but lab.task is precision_diff"
    ):
        parse_config(Digits, {"precision": precision, "lab": {"task": "precision_diff"}})


@pytest.mark.parametrize("task", ["precision_plan", "precision_diff"])
def test_weights_in_bf16_are_not_measured(task: str) -> None:
    """A run with bf16 weights is refused, since fp32 copies of them were not trained."""
    values = {"precision": "bf16", "training": {"weights": "bf16"}, "lab": {"task": task}}
    with pytest.raises(
        ConfigError, match=f"weights is bf16, but lab.task is {task}; allowed: fp32"
    ):
        parse_config(Digits, values)


def test_a_worker_measures_checkpoints_of_an_ended_run(site: Site) -> None:
    """Measurements are runs of their own without steps. They can be cancelled, and their
    files must exist.
    """

    def submit(task: str, **lab: Any) -> int:
        lab |= {"task": task, "fresh_weights": True, "batches": 1}
        config = {"precision": "fp16", "training": {"steps": 20}, "lab": lab}
        return site.submit(config=config, parent_id=trained, parent_step=20)

    def submit_endless() -> int:
        sizes = {"recipe": {"width": 8}, "training": {"batch_size": 8}}
        config = {"precision": "fp16", "lab": {"task": "precision_plan"}, **sizes}
        return site.submit(recipe="gated_mlp", config=config)

    def contents(run_id: int, kind: str) -> dict[int, Any]:
        query = select(Diagnosis.step, Diagnosis.content)
        query = query.where(Diagnosis.run_id == run_id, Diagnosis.kind == kind)
        with site.database.reading() as session:
            return {row.step: row.content for row in session.execute(query)}

    training = {"training": {"steps": 20}, "checkpoints": {"every_steps": 10}}
    with site.start_gated_worker():
        trained = site.submit(config={"precision": "fp16", **training})
        site.wait(trained)
        plan, diff = submit("precision_plan", checkpoints=["10", "20"]), submit("precision_diff")
        assert site.wait(plan).error is None
        assert site.wait(diff).error is None
        cancelled = submit_endless()
        site.wait(cancelled, Status.RUNNING)
        with site.database.writing() as session:
            run_control.cancel(session, cancelled, site.owner)
        assert site.wait(cancelled).status == Status.CANCELLED
        missing = submit("precision_plan", checkpoints=["10"])
        with site.database.writing() as session:
            gone = CheckpointFile.run_id == trained, CheckpointFile.step == 10
            for row in session.scalars(select(CheckpointFile).where(*gone)):
                session.delete(row)
        site.wait(missing)
    measured = contents(plan, "precision_plan")[0]
    assert list(measured["of_precision"]["fp16"]["by_weights"]) == [
        "fresh weights",
        "step 10",
        "step 20",
    ]
    assert list(contents(diff, "precision_diff")) == [20]
    run = site.run(plan)
    assert (run.status, run.step, run.steps_total) == (Status.FINISHED, 0, 0)
    assert run.name == "digits-precision-plan"
    with site.database.reading() as session:
        statuses = [row.status for row in runs.statuses(session, plan)]
    assert statuses == [Status.QUEUED, Status.STARTING, Status.RUNNING, Status.FINISHED]
    assert not contents(cancelled, "precision_plan")
