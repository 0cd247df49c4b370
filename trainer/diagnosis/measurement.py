"""Measurements that a run makes instead of training: lab.task of its configuration.

They change no weights of a run. A precision plan is of the first batches of a training, a precision
diff of the micro-batch that its first device would train next after a checkpoint.
"""

import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.number_formats import number
from halfstep.precision_lab.diff import diff_of
from halfstep.precision_lab.plan_event import event_of
from halfstep.precision_lab.plan_measurement import Bounds
from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, PrecisionDiff
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.initial_weights import start_from_weights
from trainer.data.sources import make_single_source
from trainer.diagnosis.precision_diff import DTYPES, first_loss
from trainer.diagnosis.precision_plan import module_names, plan_recipe
from trainer.setup import make_recipe, set_up_process, transform
from trainer.step import make_scaler

PROGRESS_SECONDS = 5.0
#: Modules whose own share in the gradient's error a diff measures.
CAUSES = 20


@dataclass(frozen=True)
class Measurement:
    """Parameters of a measurement, and the receiver of its events."""

    recipe_class: type[Recipe]
    config: RunConfig
    device: torch.device
    checkpoints: Mapping[str, Path]  # files by name
    weights: Mapping[str, Path]  # initial weights, as of trainer.setup.prepare_run
    on_event: Callable[[Event], None]


def measure(measurement: Measurement) -> None:
    """Make the measurement of a run, report its events, and print its result.

    Raises ConfigError, RecipeError, CheckpointError, WeightsError or ValueError, for errors of the
    user and for models of which it cannot be made.
    """
    if measurement.config.lab.task == "precision_plan":
        _plan(measurement)
    else:
        _diff(measurement)


def _plan(measurement: Measurement) -> None:
    config, on_event = measurement.config, measurement.on_event
    plan, _ = plan_recipe(
        measurement.recipe_class,
        config.model_dump(mode="json"),
        device=measurement.device,
        checkpoints=list(measurement.checkpoints.values()),
        names=list(measurement.checkpoints),
        prepare=lambda recipe: start_from_weights(
            measurement.weights, recipe.modules, config, on_event
        ),
        with_fresh=config.lab.fresh_weights,
        batches=config.lab.batches,
        bounds=Bounds(config.lab.max_error, config.lab.min_cosine),
        on_progress=_Progress(),
    )
    on_event(event_of(plan))
    sys.stdout.write("\n".join(plan.sentences()) + "\n")


class _Progress:
    """Prints lines of progress, at most one every PROGRESS_SECONDS."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            self._next_at = now + PROGRESS_SECONDS


def _diff(measurement: Measurement) -> None:
    """Make a diff at each checkpoint; without one, of the first batch with initial weights."""
    config, on_event = measurement.config, measurement.on_event
    device = set_up_process(measurement.device, config.training)
    recipe = make_recipe(measurement.recipe_class, config, device)
    recipe.scaler = scaler = make_scaler(config, device)
    modules = dict(recipe.modules)
    if not measurement.checkpoints:
        start_from_weights(measurement.weights, modules, config, on_event)
    transform(modules, recipe.optimizers, config, device)
    source = make_single_source(recipe, config, device)
    for path in measurement.checkpoints.values() or [None]:
        step, position, scale = 0, 0, config.scaler.init_scale
        recipe_state = recipe.state_dict()
        if path is not None:
            state = checkpoint.load(path)
            step, position = state["progress"]["step"], state["progress"]["position"]
            scale = state["scaler"].get("scale", scale)
            recipe_state = checkpoint.in_memory(state["recipe_state"])
            _load(modules, state, path)
            source.load_state(state["data"])
        given = source.take(position)

        def loss(given: Any = given, recipe_state: Any = recipe_state) -> Tensor:
            return first_loss(recipe, given, deepcopy(recipe_state))

        event = diff_of(
            tuple(modules.values()),
            loss,
            DTYPES[config.precision],
            scale if scaler.is_enabled() else 1.0,
            step=step,
            given=given,
            names=module_names(modules),
            causes=CAUSES,
        )
        on_event(event)
        sys.stdout.write(f"{in_words(event)}\n")


def _load(modules: Mapping[str, torch.nn.Module], state: Mapping[str, Any], path: Path) -> None:
    try:
        for name, module in modules.items():
            module.load_state_dict(state["modules"][name])
    except (KeyError, RuntimeError) as error:
        text = f"{path.name} does not fit the recipe as it is configured: {error}"
        raise CheckpointError(text) from error


def in_words(diff: PrecisionDiff) -> str:
    """Return the result of a diff as a line of the run's log."""
    return (
        f"Step {diff.step}: gradient error {number(diff.error)}, cosine {number(diff.cosine, 6)}; "
        f"suggested modules for fp32: {', '.join(diff.suggested[:10]) or 'none'}."
    )
