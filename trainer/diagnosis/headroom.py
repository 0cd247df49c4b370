"""Headroom of activations and gradients in fp16; see halfstep.watching.headroom.

Measured at an interval, by a hook that exists only in those steps. Not with torch.compile: adding
and removing hooks would recompile the network each time.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event
from halfstep.watching import headroom
from halfstep.watching.headroom import Compiled, find_modules_to_measure, headroom_event
from trainer.observers import CopyingObserver
from trainer.optimizers import StepResult
from trainer.precision.module_names import named


class Headroom(CopyingObserver):
    """Measures in steps that are due; otherwise costs a comparison."""

    is_diagnosis = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: RunConfig,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(on_event)
        self._every_steps = config.diagnosis.headroom_every_steps
        self._is_compiled = config.training.compile
        names = {module: name for name, module in reversed(list(named(modules)))}
        self._names = find_modules_to_measure(names)
        self._measuring = headroom.Headroom(with_smallest=True)

    def before_step(self, step: int) -> None:
        """Start the measurement, if the step is due."""
        self._step = step
        if not self._every_steps or step % self._every_steps:
            return
        try:
            if self._is_compiled:
                raise Compiled
            self._measuring.begin(self._names)
        except Compiled as error:
            self._every_steps = 0
            sys.stderr.write(f"Halfstep: headroom is not measured. {error}.\n")

    def reads_inside(self) -> bool:
        """Return whether this step is measured."""
        return self._measuring.is_on

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the measurements, and report complete copies."""
        if self._measuring.is_on:
            self._measuring.end()
            measured, numbers = self._measuring.read()
            if measured:
                report = partial(self._report, self._step, measured)
                self._host_copies.send(report, result.scale, numbers)
        self._host_copies.report()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the measurement: the work is not part of the step."""
        with self._measuring.suspend():
            yield

    def _report(self, step: int, measured: list[headroom.Measured], arrived: list[Tensor]) -> None:
        scale, numbers = arrived
        self._on_event(headroom_event(step, float(scale), measured, numbers))
