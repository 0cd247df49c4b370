"""Where a run's gradients lie against fp16's window, every so many steps; see halfstep.exponents.

Counted between unscaling and the clip. In the other steps it costs nothing.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from halfstep.exponents import Exponents
from halfstep.parcel import Parcels
from halfstep.run_settings import Diagnosis
from halfstep.spool import Event
from trainer.observers import Observer
from trainer.watched import StepResult, WatchedOptimizer


class Histogram(Observer):
    """Counts in the steps that are due; otherwise costs a comparison."""

    is_diagnosis = True

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        settings: Diagnosis,
        device: torch.device,
        on_event: Callable[[Event], None],
    ) -> None:
        self._every_steps = settings.histogram_every_steps
        self._on_event = on_event
        names = [name for watched in optimizers.values() for name in watched.names]
        self._exponents = Exponents(names, device)
        self._step = 0
        self._counts: Tensor | None = None  # while a step is counted
        self._parcels = Parcels()

    def before_step(self, step: int) -> None:
        """Say which step comes."""
        self._step = step
        if self._every_steps and step % self._every_steps == 0:
            self._counts = self._exponents.nothing()

    def unscaled(self, optimizer: WatchedOptimizer) -> None:
        """Count this optimizer's gradients, if the step is due: unscaled, not clipped yet."""
        if self._counts is None:
            return
        gradients = (parameter.grad for parameter in optimizer.parameters)
        self._exponents.count(self._counts, zip(optimizer.names, gradients, strict=True))

    def after_step(self, result: StepResult) -> None:
        """Send off what was counted, and report what has arrived."""
        if self._counts is not None:
            report = partial(self._report, self._step)
            self._parcels.send(report, result.scale, self._counts)
            self._counts = None
        self._parcels.report()

    def drain(self) -> None:
        """Wait for the device and report what is left."""
        self._parcels.report(wait=True)

    def _report(self, step: int, arrived: list[Tensor]) -> None:
        scale, counts = arrived
        self._on_event(self._exponents.event(step, float(scale), counts))
