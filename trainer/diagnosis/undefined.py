"""Nonfinite values of a recipe in fp32, and so in every precision at any loss scale.

One step runs as the armed ones of watched scripts do (halfstep.shadow).
"""

from collections.abc import Iterator

import numpy as np
import torch

from halfstep.diagnosis.observations import NONFINITE, Observation, Observations
from halfstep.diagnosis.statements import place_of, statement_of
from halfstep.recipe import Recipe
from halfstep.recording.gradients import module_names
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.spool import Steps
from trainer.data.sources import drawn
from trainer.diagnosis.op_recorder import Finding
from trainer.diagnosis.recipe_checks import CPU, small_config
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe
from trainer.several_losses import as_losses
from trainer.step import make_autocast, make_scaler

LATER = (
    "not finite in fp32 from step {first} on, but finite in step 1: neither precision nor loss "
    "scale can fix this. Look for a learning rate that is too large, or for the values of a later "
    "batch"
)


def undefined_in_fp32(
    recipe_class: type[Recipe], values: JsonObject, steps: Steps
) -> Iterator[Finding]:
    """Yield findings about nonfinite values and all-zero gradients.

    steps: records of the check's fp32 steps.
    """
    if not len(steps):
        return
    if not steps["grad_norm"].any():
        yield Finding(
            "warning",
            f"all gradients are 0 in each of {len(steps)} steps in fp32: the loss does not depend "
            "on the weights (a factor of 0, detach, or dead units)",
        )
        return
    is_lost = (steps["flags"] & NONFINITE_LOSS != 0) | ~np.isfinite(steps["grad_norm"])
    if not is_lost.any():
        return
    first = int(steps["step"][np.flatnonzero(is_lost)[0]])
    observation = _observed(recipe_class, values)
    if observation is None:
        yield Finding("error", LATER.format(first=first))
    else:
        statement = statement_of(observation)
        place = place_of(observation.first.site)
        yield Finding("error", f"{statement.text} {statement.advice}", place)


def _observed(recipe_class: type[Recipe], values: JsonObject) -> Observation | None:
    """Return what is not finite in the first step; None if all values in it are finite."""
    config = small_config(recipe_class, values, "fp32")
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, CPU)
    recipe.scaler = make_scaler(config, CPU)
    seed_everything(0)
    batch = drawn(recipe, torch.arange(config.training.batch_size), CPU)
    observations = Observations()
    sanitizer = Sanitizer(observations.add)
    for name, module in recipe.modules.items():
        prefixed = {m: f"{name}.{n}" for m, n in module_names((module,)).items()}
        sanitizer.names.add(prefixed | {module: name})
    weights = [p for module in recipe.modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(weights)
    losses = iter(recipe.training_step(batch))
    while True:
        sanitizer.arm(1)
        try:
            with make_autocast(config, CPU):
                yielded = next(losses, None)
            if yielded is None:
                return None
            for loss in as_losses(yielded):
                sanitizer.loss(loss.value)
                sanitizer.backward_begins([loss.value])
                loss.value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                sanitizer.backward_ends()
            sanitizer.judge(optimizer)
            sanitizer.next_step(1)
        finally:
            sanitizer.disarm()
        found = [each for each in observations.found(1) if each.first.kind in NONFINITE]
        if found:
            return found[0]
