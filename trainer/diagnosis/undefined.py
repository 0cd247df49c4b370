"""Nonfinite values of a recipe in fp32, and so in every precision at any loss scale.

Uses the evidence of watched scripts (halfstep.evidence.origin): one step with hooks, and the first
module or operation with a nonfinite value.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from halfstep.evidence.origin import Origin
from halfstep.recipe import Recipe
from halfstep.recording.gradients import module_names
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopies
from trainer.data.sources import drawn
from trainer.diagnosis.op_recorder import Finding
from trainer.diagnosis.recipe_checks import CPU, small_config
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe
from trainer.several_losses import as_losses
from trainer.step import make_autocast, make_scaler

ADVICE = (
    "its derivative is undefined there. Add an eps inside the root, clamp before the logarithm or "
    "division, or select safe values with torch.where before the operation"
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
    event = _origin(recipe_class, values)
    yield Finding("error", _words(event, first), (event and event.source) or "")


def _origin(recipe_class: type[Recipe], values: JsonObject) -> events.Origin | None:
    """Return the origin event of the first step; None if all values in it are finite."""
    config = small_config(recipe_class, values, "fp32")
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, CPU)
    recipe.scaler = make_scaler(config, CPU)
    seed_everything(0)
    batch = drawn(recipe, torch.arange(config.training.batch_size), CPU)
    origins: list[Event] = []
    origin = Origin(origins.append, HostCopies())
    for name, module in recipe.modules.items():
        prefixed = {m: f"{name}.{n}" for m, n in module_names((module,)).items()}
        origin.add(prefixed | {module: name})
    losses = iter(recipe.training_step(batch))
    while not origins:
        origin.check()
        try:
            with make_autocast(config, CPU):
                yielded = next(losses, None)
            if yielded is None:
                return None
            value = 0.0
            for loss in as_losses(yielded):
                value += loss.value.item()
                origin.arm([loss.value])
                loss.value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                origin.passed()
            is_finite = math.isfinite(value) and all(
                p.grad is None or bool(p.grad.isfinite().all())
                for module in recipe.modules.values()
                for p in module.parameters()
            )
            origin.end(1, 1.0, float(not is_finite), value)
            origin.report()
        finally:
            origin.disarm()
    [event] = (each for each in origins[:1] if isinstance(each, events.Origin))
    return event


def _words(event: events.Origin | None, first: int) -> str:
    if event is None:
        return (
            f"not finite in fp32 from step {first} on, but finite in step 1: neither precision nor "
            "loss scale can fix this. Look for a learning rate that is too large, or for the "
            "values of a later batch"
        )
    where = " of ".join(filter(None, (event.operation, event.module)))
    if event.direction == "backward":
        return (
            f"the gradient of {where or 'an operation'} is not finite in fp32, with a finite loss: "
            f"{ADVICE}"
        )
    if event.kind == "inputs":
        return "the batch contains inf or NaN: clean or drop those examples"
    if event.kind == "inside":
        return (
            f"the output of {event.module} is not finite in fp32, with finite inputs: look for the "
            "logarithm of 0, a division by 0 or the square root of a negative number in it"
        )
    if event.kind == "weights":
        return f"the weights of {event.module} are not finite at the start"
    return (
        "the loss is not finite in fp32, but the outputs of all modules are: look for the "
        "logarithm of 0, a division by 0 or the square root of a negative number in the loss"
    )
