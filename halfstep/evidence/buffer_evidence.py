"""Buffers and untrained weights that have become nonfinite. This module imports torch."""

from collections.abc import Callable
from itertools import chain

from torch import nn

from halfstep.evidence.nonfinite_tensors import search
from halfstep.telemetry.events import Event, NonfiniteBuffers
from halfstep.watching.async_host_copy import HostCopies

NAMES = 50  # maximum per event


class BufferEvidence:
    """Reports each buffer once."""

    def __init__(self, on_event: Callable[[Event], None], host_copies: HostCopies) -> None:
        self._on_event, self._host_copies = on_event, host_copies
        self.modules: tuple[nn.Module, ...] = ()
        self._has_read = False
        self._by_design: set[str] = set()
        self._poisoned: set[str] = set()

    def read(self, step: int | None, *, at_end: bool = False) -> None:
        """Find nonfinite buffers, and nonfinite weights that no optimizer has.

        step: the skip that may have caused them; None before the first step, where they are by
        design.
        """
        is_first, self._has_read = not self._has_read, True
        if step is not None and is_first:
            return

        def report(bad: list[str]) -> None:
            if step is None:
                self._by_design = set(bad)
                return
            new = [n for n in bad if n not in self._by_design and n not in self._poisoned]
            self._poisoned.update(new)
            if new:
                shown = new[:NAMES]
                self._on_event(
                    NonfiniteBuffers(step=step, count=len(new), buffers=shown, at_end=at_end)
                )

        averaged = (
            (name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        )
        buffers = (buffer for module in self.modules for buffer in module.named_buffers())
        search(chain(buffers, averaged), self._host_copies, report)
