"""Buffers that an overflow left with an inf or NaN. This module imports torch.

A skipped step does not change the weights, but a BatchNorm's running statistics contain the batch,
and no later batch removes an inf from them. So a check is enough when the skip is known to the
host, steps later. Buffers that are nonfinite when the loop gives them, or that it makes so before
its first backward pass, are so by design, such as a causal mask of -inf, and are never reported.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from torch import Tensor

from halfstep.evidence.nonfinite_tensors import search
from halfstep.telemetry.events import Event, NonfiniteBuffers
from halfstep.watching.async_host_copy import HostCopies

NAMES = 50  # maximum per event


class BufferEvidence:
    """Reports each buffer once."""

    def __init__(
        self,
        list_tensors: Callable[[], Iterable[tuple[str, Tensor]]],
        on_event: Callable[[Event], None],
        host_copies: HostCopies,
    ) -> None:
        """list_tensors: yields the tensors to check, by name."""
        self._list_tensors = list_tensors
        self._on_event, self._host_copies = on_event, host_copies
        self._has_begun = False
        self._given: set[str] = set()  # names of buffers that were there before a forward pass
        self._infinite_when_given: set[str] = set()
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

    def meet(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        """Check buffers before the first forward pass, which may change them."""
        if not self._has_begun:
            self._given.update(name for name, _ in buffers)
            search(buffers, self._host_copies, self._infinite_when_given.update)

    def begin(self) -> None:
        """Check the tensors before the first backward pass; later without effect."""
        if not self._has_begun:
            self._has_begun = True
            search(self._list_tensors(), self._host_copies, self._begin_with)

    def read(self, step: int, *, at_end: bool = False) -> None:
        """Check the tensors. step: the skip that may have caused nonfinite values."""
        if self._has_begun:
            search(self._list_tensors(), self._host_copies, partial(self._report, step, at_end))

    def _begin_with(self, infinite: list[str]) -> None:
        finite = self._given - self._infinite_when_given
        self._by_design = set(infinite) - finite

    def _report(self, step: int, at_end: bool, infinite: list[str]) -> None:
        new: dict[int, list[str]] = {}
        for name in infinite:
            if name not in (self._by_design or ()) and name not in self._reported:
                new.setdefault(self._since.setdefault(name, step), []).append(name)
        for since, names in sorted(new.items()):
            self._reported.update(names)
            count, shown = len(names), names[:NAMES]
            event = NonfiniteBuffers(step=since, count=count, buffers=shown, at_end=at_end or UNSET)
            self._on_event(event)
