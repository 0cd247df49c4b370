"""Check of buffers after skips, see halfstep.evidence.buffer_evidence.

A run without skips makes only the check before the first step, and no step waits for its result.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from halfstep.evidence.buffer_evidence import BufferEvidence
from halfstep.telemetry.events import Event
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from trainer.observers import CopyingObserver


class NonfiniteBuffers(CopyingObserver):
    """Checks floating-point buffers after skips."""

    is_diagnosis = True

    def __init__(self, modules: Mapping[str, nn.Module], on_event: Callable[[Event], None]) -> None:
        super().__init__(on_event)
        self._modules = modules
        self._evidence = BufferEvidence(self._list_buffers, on_event, self._host_copies)

    def state_dict(self) -> dict[str, Any]:
        """Return the nonfinite buffers, since when, and which of them are reported."""
        return self._evidence.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._evidence.load_state_dict(state)

    def before_step(self, step: int) -> None:
        """Check the buffers before the first step."""
        self._evidence.begin()

    def receive(self, records: Steps) -> None:
        """Check the buffers if any of these steps was skipped."""
        skipped = records["step"][records["flags"] & SKIPPED != 0]
        if len(skipped):
            self._evidence.read(int(skipped[0]))

    def _list_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._modules.items():
            for path, buffer in module.named_buffers():
                yield f"{name}.{path}", buffer
