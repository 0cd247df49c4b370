"""Precision plans of recipes: with fresh weights and checkpoints, as runs are configured."""

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field

from halfstep.cli.options import configuration
from halfstep.precision_lab.plan_measurement import Bounds
from halfstep.recipe import RecipeConfig
from halfstep.run_config import ConfigError, parse_config
from halfstep.session.nesting import merge
from tests.halfstep.precision_lab.cases_made import between
from tests.halfstep.precision_lab.plans_made import cancel
from tests.site import halfstep
from tests.trainer.conftest import CPU, Pair, Regression
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.data.sampler import Sampler
from trainer.data.sources import drawn
from trainer.diagnosis.precision_plan import FRESH, plan_recipe, submit_command
from trainer.loop import train
from trainer.precision.module_precision import set_precisions
from trainer.recipes.digits import Digits
from trainer.setup import make_recipe, prepare_run, set_up_process
from trainer.step import make_autocast

BOUNDS = Bounds(0.02, 0.999)
TEMPLATE = Path(__file__).parents[3] / "docs" / "how-to" / "recipe_template.py"


class Cancelling(Regression):
    """A network whose second module subtracts a number that it has added."""

    name: ClassVar = "cancelling"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.inputs = torch.randn(64, 32)
        self.targets = torch.randn(64, 32)
        self.modules = {"model": between(cancel(300))}
        self.optimizers = {"sgd": torch.optim.SGD(self.modules["model"].parameters(), lr=0.1)}


def gradient(config: Any, scale: float) -> dict[str, torch.Tensor]:
    """Return the gradient of a recipe's first batch as the loop computes it, without the scale."""
    recipe = make_recipe(Cancelling, config, set_up_process(CPU, config.training))
    set_precisions(recipe.modules, config, CPU)
    indices = Sampler(recipe.train_size, config.training).indices(0)
    inputs, targets = drawn(recipe, indices, CPU)
    with make_autocast(config, CPU):
        loss = F.mse_loss(recipe.modules["model"](inputs), targets)
    (loss * scale).backward()
    return {n: p.grad / scale for n, p in recipe.modules["model"].named_parameters()}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_planned_error_is_that_of_the_run(precision: str) -> None:
    """A run with the settings of a point has the gradient that the plan has measured."""
    plan, _ = plan_recipe(Cancelling, {}, device=CPU, batches=1, bounds=BOUNDS)
    point = plan.of_precision[precision]
    assert point.fp32 == ["model.1"]
    exact = gradient(parse_config(Cancelling, {"precision": "fp32"}), 1.0)
    for settings, error in (
        (point.config, point.error),
        ({"precision": precision}, None),
    ):
        own = gradient(parse_config(Cancelling, settings), point.init_scale or 1.0)
        difference = math.sqrt(sum(float((own[n] - exact[n]).square().sum()) for n in exact))
        measured = difference / math.sqrt(sum(float(g.square().sum()) for g in exact.values()))
        if error is None:
            assert measured > BOUNDS.max_error
        else:
            assert measured == pytest.approx(error, rel=1e-5)


def save(folder: Path, recipe: Any, **training: Any) -> list[Path]:
    """Train six steps with a checkpoint every three; return the files."""
    values = {
        "training": {"steps": 6, "batch_size": 8} | training,
        "checkpoints": {"every_steps": 3},
        "evaluation": {"every_steps": None},
    }
    train(
        prepare_run(
            recipe,
            parse_config(recipe, values),
            device=CPU,
            on_steps=lambda _: None,
            on_event=lambda _: None,
            checkpoint_folder=folder,
        )
    )
    return sorted(folder.glob("*.pt"))


def test_checkpoints_are_planned_with(tmp_path: Path) -> None:
    """A plan has errors for each checkpoint, its configuration, and optionally fresh weights."""
    files = save(tmp_path, Regression)
    assert len(files) == 2
    lines: list[str] = []
    plan, _ = plan_recipe(
        Regression, {}, device=CPU, checkpoints=files, bounds=BOUNDS, on_progress=lines.append
    )
    assert lines[0] == "Measurement 1: batch 1 of 6, fresh weights"
    assert lines[5] == "Measurement 6: batch 6 of 6, step-00000006.pt"
    assert len(lines) > 12  # each batch in fp32, fp16 and bf16
    errors = plan.of_precision["fp16"].by_weights
    assert list(errors) == ["fresh weights", "step-00000003.pt", "step-00000006.pt"]
    assert len(set(errors.values())) == 3
    assert plan.batches == 6
    trained, _ = plan_recipe(
        Regression, {}, device=CPU, checkpoints=files, with_fresh=False, bounds=BOUNDS
    )
    assert trained.of_precision["fp16"].by_weights == {
        name: error for name, error in errors.items() if name != "fresh weights"
    }
    assert max(errors.values()) == plan.of_precision["fp16"].error


def test_checkpoints_of_one_name_are_all_planned_with(tmp_path: Path) -> None:
    """Checkpoint files of the same name are distinguished by their folders."""
    first, second = save(tmp_path / "saved", Regression)
    files = [tmp_path / name for name in ("a/x/last.pt", "b/x/last.pt", "b/last.pt", FRESH)]
    for file, source in zip(files, (first, second, second, first), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, file)
    files.append(second)
    plan, _ = plan_recipe(
        Regression, {}, device=CPU, checkpoints=files, batches=1, bounds=Bounds(0.1, 0.99)
    )
    errors = plan.of_precision["fp16"].by_weights
    assert list(errors) == [
        FRESH,
        "a/x/last.pt",
        "b/x/last.pt",
        "b/last.pt",
        f"{tmp_path.name}/{FRESH}",
        second.name,
    ]
    _, *own = errors.values()
    assert own == [own[0], own[1], own[1], own[0], own[1]]
    assert len(set(errors.values())) == 3
    assert plan.batches == 6


@pytest.mark.parametrize(
    "recipe", [pytest.param(Pair, marks=pytest.mark.extended), Regression, Digits]
)
def test_healthy_recipe_is_in_fp16_everywhere(recipe: Any) -> None:
    """The best plan of a healthy recipe is fp16 everywhere, also with several optimizers."""
    values = {"training": {"batch_size": 16}, "modules": {"fp32": ["model"]}}
    plan, _ = plan_recipe(recipe, values, device=CPU, bounds=Bounds(0.1, 0.99))
    assert str(plan.best) == "fp16 everywhere"
    assert {name.split(".")[0] for row in plan.modules for name in row.names} <= {
        "model",
        "(loss)",
    }


def test_wrong_sizes_are_rejected(tmp_path: Path) -> None:
    """Too many batches, missing weights and another recipe's checkpoint are rejected by name."""
    with pytest.raises(ConfigError, match=r"17 batches with each of 1 weights are more than 16"):
        plan_recipe(Regression, {}, device=CPU, batches=17, bounds=BOUNDS)
    with pytest.raises(ConfigError, match="0 checkpoints without fresh weights"):
        plan_recipe(Regression, {}, device=CPU, with_fresh=False, bounds=BOUNDS)
    [file, *_] = save(tmp_path, Cancelling)
    with pytest.raises(
        CheckpointError, match=r"step-00000003\.pt is of the recipe cancelling, not"
    ):
        plan_recipe(Regression, {}, device=CPU, checkpoints=[file], bounds=BOUNDS)


@pytest.mark.slow
def test_recipe_plan_from_the_command() -> None:
    """The plan command prints the plan and the command that submits it, or JSON."""
    ended = halfstep("recipe", "plan", str(TEMPLATE), "--batches", "1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Fastest within the bounds on a GPU, as predicted: fp16")
    *_, command = ended.stdout.splitlines()
    assert shlex.split(command)[:5] == [
        *("halfstep", "submit", str(TEMPLATE)),
        *("--set", "precision=fp16"),
    ]
    as_json = json.loads(halfstep("recipe", "plan", str(TEMPLATE), "--json").stdout)
    assert as_json["recipe"] == "diabetes"
    assert as_json["points"][as_json["best"]]["config"]["precision"] == "fp16"
    wrong = halfstep("recipe", "plan", str(TEMPLATE), "--set", "training.nope=1", "--json")
    assert wrong.returncode == 2
    assert "training.nope" in json.loads(wrong.stderr)["error"]
    both = halfstep("recipe", "plan", "digits", "--run", "1", "--checkpoint", "a.pt")
    assert both.returncode == 2
    assert "omit --checkpoint" in both.stderr


def test_submit_command_is_quoted() -> None:
    """Settings in the submit command are shell words with their value as JSON."""
    plan, config = plan_recipe(Cancelling, {}, device=CPU, batches=1, bounds=BOUNDS)
    words = shlex.split(submit_command("my recipes/a.py", plan.best, config))
    assert words[:3] == ["halfstep", "submit", "my recipes/a.py"]
    assert words[3:] == [
        *("--set", "precision=fp16"),
        *("--set", 'modules.fp32=["model.1"]'),
        *("--set", "scaler.init_scale=65536.0"),
    ]


def test_fp32_is_submitted_without_tf32() -> None:
    """A plan's fp32 point is submitted without TF32, whatever settings the plan had."""
    values = {"training": {"tf32": True}}
    plan, config = plan_recipe(Cancelling, values, device=CPU, batches=1, bounds=BOUNDS)
    [exact] = [point for point in plan.points if point.precision == "fp32"]
    for point, is_on in ((exact, False), (plan.best, True)):
        words = shlex.split(submit_command("cancelling", point, config))
        submitted = parse_config(Cancelling, configuration(words[4::2], None))
        assert submitted.training.tf32 is is_on


class Labelled(Cancelling):
    """A recipe whose defaults name modules, with fields of several types."""

    name: ClassVar = "labelled"
    defaults: ClassVar = {
        "training": {"steps": 5, "batch_size": 8},
        "modules": {"fp32": ["model.0"], "bf16": ["model.2"]},
    }

    class Config(RecipeConfig):
        """Settings of a text and a mapping."""

        label: str = "none"
        sizes: dict[str, int] = Field({"a": 1, "b": 2})


def test_submit_command_is_what_was_planned(tmp_path: Path) -> None:
    """The submitted run has the settings of call and checkpoint, and the point's precisions."""
    [file, _] = save(tmp_path, Labelled, seed=7, schedule="cosine")
    values = {
        "precision": "bf16",
        "training": {"batch_size": 16},
        "modules": {"fp32": ["model"], "checkpointed": ["model.1"]},
        "recipe": {"label": "123", "sizes": {"a": 1, "b": 3}},
    }
    plan, config = plan_recipe(
        Labelled, values, device=CPU, checkpoints=[file], batches=1, bounds=BOUNDS
    )
    planned = config.model_dump()
    assert (planned["training"]["seed"], planned["training"]["batch_size"]) == (7, 16)
    for point in {str(point): point for point in [plan.best, *plan.points]}.values():
        words = shlex.split(submit_command("labelled", point, config))
        submitted = parse_config(Labelled, configuration(words[4::2], None)).model_dump()
        modules = {"fp32": point.fp32, "bf16": point.bf16}
        assert submitted == merge(merge(planned, point.config), {"modules": modules})
    assert plan.best.fp32 == ["model.1"]
    assert not any(word.startswith(("data.", "recipe.learning_rate")) for word in words)
