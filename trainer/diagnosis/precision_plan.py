"""Precision plan of a recipe: `halfstep recipe plan`; see halfstep.precision_lab.plan.

Measures batches of the training's own order, with the recipe's fresh weights and those of
checkpoints. A recipe with several optimizers is planned by the first losses that it yields.
"""

import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.client import Client
from halfstep.precision_lab.comparison import Comparison
from halfstep.precision_lab.plan import MOST_BATCHES, plan_of
from halfstep.precision_lab.plan_measurement import Bounds, Situation
from halfstep.precision_lab.plan_result import (
    FP32_COST,
    MODULE_COLUMNS,
    POINT_COLUMNS,
    PlanPoint,
    PrecisionPlan,
    module_cells,
    point_cells,
)
from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import ConfigError, RunConfig, parse_config
from halfstep.session.nesting import flat
from halfstep.telemetry.plain_json import ENCODER, JsonObject
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.console import chosen_device, parse_assignments
from trainer.data.sources import make_single_source
from trainer.diagnosis.precision_diff import first_loss
from trainer.precision.module_names import named
from trainer.registered_recipes import NotRegisteredError
from trainer.registry import UnknownRecipeError, load_recipe
from trainer.setup import make_recipe, set_up_process
from trainer.step import make_scaler

MODULES_SHOWN = 10
MOST_CHECKPOINTS = 3  # of a run
MOST_WEIGHTS = 8
TF32_COST = 2.0  # of an operation, relative to half precision, where nothing is measured
FRESH = "fresh weights"


def main(
    name: str,
    settings: Sequence[str],
    *,
    device: str | None,
    run: int | None,
    checkpoints: Sequence[Path],
    with_fresh: bool,
    batches: int,
    bounds: Bounds,
    as_json: bool,
) -> None:
    """Plan a recipe, and print the plan. Raises SystemExit with 2 if it cannot be planned."""
    try:
        recipe_class = load_recipe(name)
        folder: AbstractContextManager[str] = nullcontext("")
        if run is not None:
            folder = tempfile.TemporaryDirectory(prefix="halfstep-plan-")
        with folder as path:
            files = list(checkpoints) if run is None else download(run, Path(path))
            plan, config = plan_recipe(
                recipe_class,
                parse_assignments(settings),
                device=chosen_device(device),
                checkpoints=files,
                with_fresh=with_fresh,
                batches=batches,
                bounds=bounds,
            )
    except (
        ConfigError,
        RecipeError,
        CheckpointError,
        UnknownRecipeError,
        NotRegisteredError,
        ValueError,
    ) as error:
        text = json.dumps({"error": str(error)}) if as_json else f"error: {error}"
        sys.stderr.write(f"{text}\n")
        sys.exit(2)
    if as_json:
        values = {"recipe": recipe_class.name, **plan.as_dict()}
        sys.stdout.write(f"{ENCODER.encode(values)}\n")
    else:
        _print(name, plan, config)


def plan_recipe(
    recipe_class: type[Recipe],
    values: JsonObject,
    *,
    device: torch.device,
    checkpoints: Sequence[Path] = (),
    names: Sequence[str] = (),
    prepare: Callable[[Recipe], None] = lambda _: None,
    with_fresh: bool = True,
    batches: int = 2,
    bounds: Bounds,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[PrecisionPlan, RunConfig]:
    """Return the plan of a recipe, and the configuration that it was made with.

    values: settings of a run, over those of the first checkpoint.  names: of the checkpoints; by
    default the ends of their paths.  prepare: called with the new recipe.  with_fresh: also with
    the weights that the recipe then has.  batches: with each of the weights.  on_progress: called
    before each measurement of a batch with a line that names it.
    Raises ConfigError, CheckpointError, and ValueError for a model of which no plan can be made.
    """
    loaded = {path.absolute(): checkpoint.load(path) for path in checkpoints}
    own_labels = dict(zip(loaded, names, strict=True)) if names else _labels(list(loaded))
    states = {own_labels[path]: state for path, state in loaded.items()}
    for label, state in states.items():
        if state["recipe"] != recipe_class.name:
            text = f"{label} is of the recipe {state['recipe']}, not {recipe_class.name}"
            raise CheckpointError(f"{text}; allowed: checkpoints of that one")
    config = _config(recipe_class, values, list(states.values()))
    count = with_fresh + len(states)
    if not 1 <= count <= MOST_WEIGHTS:
        raise ConfigError(
            f"{len(states)} checkpoints{'' if with_fresh else ' without fresh weights'}: "
            f"allowed are 1 to {MOST_WEIGHTS} weights to plan with"
        )
    if batches * count > MOST_BATCHES:
        raise ConfigError(
            f"{batches} batches with each of {count} weights are more than {MOST_BATCHES}: set "
            f"--batches to at most {MOST_BATCHES // count}"
        )
    device = set_up_process(device, config.training)
    recipe = make_recipe(recipe_class, config, device)
    recipe.scaler = make_scaler(config, device)
    prepare(recipe)
    modules = dict(recipe.modules)
    own_names = module_names(modules)
    given = _batches(recipe, config, batches, device)
    weights = _Weights(recipe, modules, states)
    labels = [label for label in weights.labels if with_fresh or label != FRESH]
    numbers = itertools.count(1)

    def situation(number: int, label: str, batch: object) -> Situation:
        def loss() -> Tensor:
            return first_loss(recipe, batch, weights.recipe_state)

        def load() -> None:
            weights.load(label)
            at = f"batch {number} of {batches * count}, {label}"
            on_progress(f"Measurement {next(numbers)}: {at}")

        weights.load(label)
        comparison = Comparison(tuple(modules.values()), loss, given=batch, own_names=own_names)
        return Situation(comparison, load, label)

    plan = plan_of(
        lambda: [
            situation(number, label, batch)
            for number, (label, batch) in enumerate(itertools.product(labels, given), start=1)
        ],
        bounds,
        fp32_cost=TF32_COST if config.training.tf32 else FP32_COST,
    )
    return plan, config


def module_names(modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the names of a recipe's modules; of a module with several the first."""
    names: dict[nn.Module, str] = {}
    for name, module in named(modules):
        names.setdefault(module, name)
    return names


def _labels(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest end of each path that no other path has, of different absolute paths."""
    labels = {}
    for path in paths:
        ends = (path.parts[-count:] for count in range(1, len(path.parts) + 1))
        labels[path] = next(
            str(Path(*end))
            for end in ends
            if end != (FRESH,) and [p.parts[-len(end) :] for p in paths].count(end) == 1
        )
    return labels


class _Weights:
    """The fresh weights of a recipe and those of checkpoints, of which one is loaded."""

    def __init__(
        self,
        recipe: Recipe,
        modules: Mapping[str, nn.Module],
        states: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._recipe, self._modules = recipe, modules
        fresh = {name: module.state_dict() for name, module in modules.items()}
        self._states: dict[str, tuple[Mapping[str, Any], Any]] = {
            FRESH: (checkpoint.in_memory(deepcopy(fresh)), deepcopy(recipe.state_dict()))
        }
        for label, state in states.items():
            self._states[label] = state["modules"], state.get("recipe_state", {})
        self._loaded, self.recipe_state = FRESH, self._states[FRESH][1]

    @property
    def labels(self) -> list[str]:
        """Names of the weights."""
        return list(self._states)

    def load(self, label: str) -> None:
        """Load weights, and the recipe's own state of them."""
        if label == self._loaded:
            return
        weights, self.recipe_state = self._states[label]
        try:
            for name, module in self._modules.items():
                module.load_state_dict(weights[name])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{label} does not fit recipe {self._recipe.name} as it is configured: {error}"
            ) from error
        self._loaded = label


def _config(
    recipe_class: type[Recipe], values: JsonObject, states: Sequence[Mapping[str, Any]]
) -> RunConfig:
    """Return the configuration: of the first checkpoint, with the values over it, in fp16."""
    merged: JsonObject = deepcopy(dict(states[0]["config"])) if states else {}
    for group, own in values.items():
        before = merged.get(group)
        merged[group] = {**before, **own} if isinstance(before, dict) else own
    modules = {k: v for k, v in merged.get("modules", {}).items() if k not in ("fp32", "bf16")}
    return parse_config(recipe_class, merged | {"precision": "fp16", "modules": modules})


def _batches(recipe: Recipe, config: RunConfig, count: int, device: torch.device) -> list[object]:
    """Return the first batches of a training."""
    source = make_single_source(recipe, config, device)
    return [source.take(number * config.training.batch_size) for number in range(count)]


def download(run: int, folder: Path) -> list[Path]:
    """Download a run's first, middle and last checkpoint. Raises ConfigError if it has none."""
    client = Client()
    steps = sorted({f["step"] for f in client.checkpoints(run) if f["kind"] == "checkpoint"})
    if not steps:
        raise ConfigError(
            f"--run {run}: the run has no checkpoint; omit --run to plan with initial weights"
        )
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})[:MOST_CHECKPOINTS]
    return [client.download(run, folder, step=step, kind="checkpoint") for step in chosen]


def _print(name: str, plan: PrecisionPlan, config: RunConfig) -> None:
    from halfstep.cli.tables import print_tables, table

    sys.stdout.write("\n".join(plan.sentences()) + "\n\n")
    points = table(POINT_COLUMNS, map(point_cells, plan.points), "Fastest mixes by gradient error")
    modules = table(
        MODULE_COLUMNS,
        map(module_cells, plan.modules[:MODULES_SHOWN]),
        "Modules by the gradient error that each causes alone",
    )
    print_tables(points, modules)
    if plan.best.is_within and not plan.best.is_loss_in_fp32:
        sys.stdout.write(f"\n{submit_command(name, plan.best, config)}\n")
    sys.stdout.flush()


def submit_command(name: str, point: PlanPoint, config: RunConfig) -> str:
    """Return the command that submits a run of a point.

    config: that of the plan. Its settings come first, unless they are the recipe's defaults.
    """
    own = flat(point.config)
    planned = _fields(config) | {"modules.fp32": point.fp32, "modules.bf16": point.bf16}
    defaults = _fields(type(config).model_validate({})).items()
    further = {k: v for k, v in planned.items() if k not in own and (k, v) not in defaults}
    words = ["halfstep", "submit", name]
    for field, value in (further | own).items():
        words += ["--set", f"{field}={value if field == 'precision' else json.dumps(value)}"]
    return shlex.join(words)


def _fields(config: RunConfig) -> dict[str, Any]:
    """Return the settings of all groups by name, as JSON has them."""
    groups = config.model_dump(mode="json", exclude={"precision"})
    return {f"{group}.{field}": value for group in groups for field, value in groups[group].items()}
