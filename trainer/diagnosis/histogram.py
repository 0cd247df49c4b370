"""Histograms of gradient exponents at an interval; see halfstep.watching.exponents.

Counted between unscaling and the clip; other steps cost nothing. Sharded gradients are counted by
each rank and summed, so an error must end the run on all ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from halfstep.config_groups import Diagnosis
from halfstep.telemetry.events import Event
from halfstep.watching.exponents import Exponents
from trainer.distributed.shards import group_of, local, sum_
from trainer.observers import CopyingObserver
from trainer.optimizers import StepResult, WatchedOptimizer


class Histogram(CopyingObserver):
    """Counts in steps that are due; otherwise costs a comparison."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        settings: Diagnosis,
        device: torch.device,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(on_event)
        self._every_steps = settings.histogram_every_steps
        names = [name for watched in optimizers.values() for name in watched.names]
        self._exponents = Exponents(names, device)
        self._shared_with = group_of(
            p for optimizer in optimizers.values() for p in optimizer.parameters
        )
        self.is_diagnosis = self._shared_with is None
        self._counts: Tensor | None = None  # while a step is counted

    def before_step(self, step: int) -> None:
        """Prepare counts, if the step is due."""
        self._step = step
        if self._every_steps and step % self._every_steps == 0:
            self._counts = self._exponents.nothing()

    def reads_inside(self) -> bool:
        """Return whether this step is counted."""
        return self._counts is not None

    def before_clip(self, optimizer: WatchedOptimizer, factor: Tensor) -> None:
        """Count this optimizer's gradients divided by their factor, if the step is due."""
        if self._counts is None:
            return
        own = (parameter.grad for parameter in optimizer.parameters)
        gradients = (None if gradient is None else local(gradient) for gradient in own)
        named = zip(optimizer.names, gradients, strict=True)
        self._exponents.count(self._counts, named, None if factor is optimizer.one else factor)

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the counts, and report complete copies."""
        if self._counts is not None:
            report = partial(self._report, self._step)
            self._host_copies.send(report, result.scale, sum_(self._counts, self._shared_with))
            self._counts = None
        self._host_copies.report()

    def _report(self, step: int, arrived: list[Tensor]) -> None:
        scale, counts = arrived
        self._on_event(self._exponents.event(step, float(scale), counts))
