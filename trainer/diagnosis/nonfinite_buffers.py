"""Buffers that an overflow left with an inf or NaN, reported after a skip.

A skipped step does not change the weights, but a BatchNorm's running statistics contain the batch,
and no later batch removes an inf from them. So a check is enough when the skip's row arrives on the
host, steps later. Buffers that are nonfinite before the first step are so by design, such as a
causal mask of -inf, and are never reported. A run without skips makes only that first check, and no
step waits for its result.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from halfstep.evidence.nonfinite_tensors import search
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from trainer.observers import CopyingObserver

NAMES_TOLD = 50


class NonfiniteBuffers(CopyingObserver):
    """Checks floating-point buffers after skips."""

    is_diagnosis = True

    def __init__(self, modules: Mapping[str, nn.Module], on_event: Callable[[Event], None]) -> None:
        super().__init__(on_event)
        self._modules = modules
        self._has_begun = False
        self._by_design: set[str] | None = None  # nonfinite before the first step; None: unknown
        self._since: dict[str, int] = {}  # others: the skip after which they were nonfinite
        self._reported: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the nonfinite buffers, since when, and which of them are reported."""
        if self._by_design is None:
            return {}
        by_design, reported = sorted(self._by_design), sorted(self._reported)
        return {"by_design": by_design, "since": dict(self._since), "told": reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._has_begun = True
        self._by_design, self._reported = set(state["by_design"]), set(state["told"])
        self._since = dict(state["since"])

    def before_step(self, step: int) -> None:
        """Check the buffers before the first step."""
        if not self._has_begun:
            self._has_begun = True
            self._check(None)

    def receive(self, records: Steps) -> None:
        """Check the buffers if any of these steps was skipped."""
        skipped = records["step"][records["flags"] & SKIPPED != 0]
        if len(skipped):
            self._check(int(skipped[0]))

    def _check(self, step: int | None) -> None:
        """Queue the check of all buffers.

        step: the first skip that may have caused nonfinite values, None before the first step.
        """
        buffers = (
            (f"{name}.{path}", buffer)
            for name, module in self._modules.items()
            for path, buffer in module.named_buffers()
        )
        search(buffers, self._host_copies, partial(self._report, step))

    def _report(self, step: int | None, infinite: list[str]) -> None:
        if step is None:
            self._by_design = set(infinite)
            return
        new: dict[int, list[str]] = {}
        for name in infinite:
            if name not in (self._by_design or ()) and name not in self._reported:
                new.setdefault(self._since.setdefault(name, step), []).append(name)
        for since, buffers in sorted(new.items()):
            self._reported.update(buffers)
            count, shown = len(buffers), buffers[:NAMES_TOLD]
            self._on_event(events.NonfiniteBuffers(step=since, count=count, buffers=shown))
