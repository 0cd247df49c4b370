"""Reports parameters that receive no gradient, once it is sufficiently certain.

An optimizer without any gradient is reported after 10 steps, single parameters after 100: rarely
used experts may get one later.
"""

from collections.abc import Callable

from torch import Tensor

from halfstep.telemetry.events import Event, NoGradient
from trainer.observers import Observer
from trainer.optimizers import WatchedOptimizer

STEPS, STEPS_OF_A_PARAMETER = 10, 100
NAMES = 50  # maximum per event


class MissingGradients(Observer):
    """Checks which gradients exist in the first steps of each optimizer."""

    is_diagnosis = True

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._step = 0
        self._steps: dict[int, int] = {}  # by an optimizer's id, in this process
        self._without: dict[int, set[int]] = {}  # positions of parameters without a gradient so far

    def before_step(self, step: int) -> None:
        """Store the step's number."""
        self._step = step

    def reads_inside(self) -> bool:
        """Return whether gradients are still checked."""
        return max(self._steps.values(), default=0) < STEPS_OF_A_PARAMETER

    def before_clip(self, optimizer: WatchedOptimizer, factor: Tensor) -> None:
        """Check which parameters have a gradient."""
        key = id(optimizer)
        steps = self._steps.get(key, 0) + 1
        if steps > STEPS_OF_A_PARAMETER:
            return
        self._steps[key] = steps
        parameters = optimizer.parameters
        needing = {i for i, p in enumerate(parameters) if p.requires_grad}
        without = {i for i in self._without.get(key, needing) if parameters[i].grad is None}
        self._without[key] = without
        is_all = steps == STEPS and len(without) == len(needing)
        if without and (is_all or steps == STEPS_OF_A_PARAMETER):
            names = [optimizer.names[i] for i in sorted(without)]
            self._on_event(
                NoGradient(
                    step=self._step,
                    optimizer=type(optimizer.optimizer).__name__,
                    parameters=names[:NAMES],
                    count=len(names),
                    of=len(needing),
                    steps=steps,
                )
            )
