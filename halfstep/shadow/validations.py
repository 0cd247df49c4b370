"""Validations of a watched loop that run with their shadows. This module imports torch."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from halfstep.diagnosis.defect import Defect
from halfstep.shadow.classify import is_bad_number, is_out_of_range, trace
from halfstep.shadow.sanitizer import Sanitizer

MOST_BATCHES, LOOK_FACTOR = 64, 10


class Validations:
    """Which validations are armed, and what an armed one shows.

    One begins where a module is set to evaluation between two steps, and ends where a module is
    called for the training, or after enough batches.
    """

    def __init__(self, sanitizer: Sanitizer, on_end: Callable[[], None]) -> None:
        """on_end: called where an armed one ends."""
        self._sanitizer, self._on_end = sanitizer, on_end
        self._seen, self._next = 0, 1  # validations, and the number of the one that is armed next
        self.is_under_way = False
        self._step = self._batches = 0
        self._deadline = 0.0
        sanitizer.names.on_outermost = self._module_called

    def is_due(self) -> bool:
        """Count a validation; return whether it is to be armed: the first, and each tenfold one."""
        self._seen += 1
        return self._seen >= self._next and not self.is_under_way

    def begin(self, step: int, deadline: float) -> None:
        """Observe a validation. step: the one before it.  deadline: by the clock of the mode."""
        self._step, self._deadline = step, deadline
        self._batches, self.is_under_way = 0, True
        self._next = LOOK_FACTOR * self._seen

    def end(self) -> Sequence[Defect]:
        """Return what it has shown: numbers that half precision has lost.

        Nothing, if a backward pass began in it: the loop trains a module in evaluation mode.
        """
        mode = self._sanitizer.mode
        if mode.is_over_budget or self._sanitizer.has_loss:
            return []
        with self._sanitizer.apart():
            lost = next(filter(is_bad_number, mode.scalars), None)
            found = [] if lost is None else [trace(lost, "validation", self._step)]
        return [defect for defect in found if is_out_of_range(defect.kind)]

    def _module_called(self, module: nn.Module) -> None:
        if not self.is_under_way or self._sanitizer.is_other_thread:
            return
        self._batches += 1
        is_training = module.training and torch.is_grad_enabled()
        is_late = self._sanitizer.mode.clock() > self._deadline
        if is_training or is_late or self._batches > MOST_BATCHES:
            self._on_end()
