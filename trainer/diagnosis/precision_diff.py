"""Precision diff of a step on request; see halfstep.precision_lab.

Repeats the first micro-batch of the step just made, with the weights after it, in the run's
precision and in fp32. With several devices the first one repeats its own examples, while the others
wait in the next step. Nothing changes: weights, buffers, generators and the recipe's own state.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.precision_lab.diff import diff_of
from halfstep.precision_lab.preservation import RandomState
from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, RequestDone
from trainer.observers import Observer
from trainer.precision.module_names import named
from trainer.several_losses import as_losses

if TYPE_CHECKING:
    from trainer.step import StepContext

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class PrecisionDiffs(Observer):
    """Makes the diffs that users request at step boundaries."""

    is_diagnosis = True

    def __init__(
        self,
        context: "StepContext",
        modules: Mapping[str, nn.Module],
        config: RunConfig,
        device: torch.device,
        on_event: Callable[[Event], None],
        suspended: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """suspended: suspends the observers of a step's work."""
        self._context, self._dtype = context, DTYPES.get(config.precision)
        self._names = {module: name for name, module in reversed(list(named(modules)))}
        self._device, self._on_event, self._suspended = device, on_event, suspended

    def request(self, step: int, request: int) -> None:
        """Make a diff of the step that was just made, and acknowledge the request."""
        try:
            if self._context.ranks.rank == 0:
                self._diff(step)
        finally:
            self._on_event(RequestDone(step=step, request=request))

    def _diff(self, step: int) -> None:
        if self._dtype is None:
            raise ValueError("a precision diff needs a run in fp16 or bf16")
        context, recipe = self._context, self._context.recipe
        random, state = RandomState([self._device]), deepcopy(recipe.state_dict())
        position = context.batches.position - context.batches.examples_in_a_step
        try:
            batch = next(iter(context.batches.again(position)))
            random.restore()

            def loss() -> Tensor:
                return first_loss(recipe, batch, state)

            with self._suspended():
                event = diff_of(
                    tuple(recipe.modules.values()),
                    loss,
                    self._dtype,
                    context.scaler.get_scale() if context.scaler.is_enabled() else 1.0,
                    step=step,
                    names=self._names,
                    is_searched=False,  # the training waits
                )
        finally:
            try:
                recipe.load_state_dict(state)
            finally:
                random.restore()
        self._on_event(event)


def first_loss(recipe: Recipe, batch: object, state: Mapping[str, object]) -> Tensor:
    """Return the sum of the losses that a recipe yields first, from its own state."""
    recipe.load_state_dict(deepcopy(dict(state)))
    losses = as_losses(next(iter(recipe.training_step(batch))))
    return torch.stack([part.value for part in losses]).sum()
