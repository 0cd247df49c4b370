"""Skips that the host knows of, some steps late: where to watch, and where the next is likely."""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.recording.ring import RING_ROWS
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopy
from trainer.precision.scale_policies import Calibration

SCALES_KEPT = 1000  # scales of skipped steps, for requested replays
#: Number of steps to watch: the default growth interval of a scale, and some more.
WATCHED_STEPS = 2500
#: Consecutive skips, more than lead from 2^24 to 16: a cause other than the scale is likely.
LONG_SEARCH = 20
#: Steps after a known skip in which another one is likely.
LIKELY_STEPS = 10
#: After calibration, skips are read as late as any row of the ring.
ROW_LATE_STEPS = RING_ROWS + 1


class Flags(NamedTuple):
    """Skip flags of the optimizers of a step that took part, (O,) on their way to the host."""

    step: int
    copies: HostCopy

    def read_skipped(self) -> Tensor:
        """Wait for the flags; return (O,) bool."""
        self.copies.wait()
        return self.copies.tensors[0] != 0


class SkipHistory:
    """Known skips, and the steps that are watched because of them."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.calibration = Calibration()
        self.scales: dict[int, float] = {}  # of skipped steps
        self.watched_until = 0  # last step to watch
        #: As far as the host knows: the last skipped step, and the one from which the scaler counts
        #: to its next growth; None until the first step.
        self._skipped_at = -LIKELY_STEPS
        self._counts_from: int | None = None
        self._flags: deque[Flags] = deque()  # until calibration is over
        # Skipped steps that have arrived, processed some steps later.
        self._arrived: deque[int] = deque()

    def begin(self, step: int) -> None:
        """Count the steps to the next growth of the scale, at the first step of a process."""
        if self._counts_from is None:
            self._counts_from = step - 1 - self._scaler._init_growth_tracker

    def add(self, flags: Flags) -> None:
        """Await flags of a step of the calibration."""
        self._flags.append(flags)

    def receive(self, records: Steps) -> None:
        """Record which of the arrived steps were skipped, at what scale."""
        for record in records[records["flags"] & SKIPPED != 0]:
            self._arrived.append(int(record["step"]))
            self.scales[int(record["step"])] = float(record["scale"])
            self.note(int(record["step"]))
        while len(self.scales) > SCALES_KEPT:
            del self.scales[next(iter(self.scales))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to watch the same steps."""
        return {
            "calibration": self.calibration.state_dict(),
            "scales": self.scales,
            "heard": list(self._arrived),
            "watched_until": self.watched_until,
            "flags": [(flags.step, bool(flags.read_skipped().any())) for flags in self._flags],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._counts_from = None
        self.calibration.load_state_dict(state["calibration"])
        self.scales, self._arrived = dict(state["scales"]), deque(state.get("heard", ()))
        self.watched_until = state.get("watched_until", 0)
        self._flags = deque(
            Flags(
                step,
                HostCopy.send(torch.tensor([float(skipped)], dtype=torch.float32, device="cpu")),
            )
            for step, skipped in state.get("flags", ())
        )

    def process(self, now: int) -> None:
        """Process skips that have arrived: after calibration, a fixed number of steps late."""
        while self._flags and self._flags[0].copies.has_arrived():
            flags = self._flags.popleft()
            if was_skipped := bool(flags.read_skipped().any()):
                self.note(flags.step)
            self.calibration.count(was_skipped)
            if self.calibration.skipped_in_a_row == LONG_SEARCH:  # it will not find a scale
                self.watched_until = max(self.watched_until, now + WATCHED_STEPS)
            if self.calibration.is_over:
                self.watched_until = now + WATCHED_STEPS
                self._flags.clear()
        while self._arrived and self._arrived[0] <= now - ROW_LATE_STEPS:
            late = self._arrived.popleft() + ROW_LATE_STEPS
            if self.calibration.is_over:
                self.watched_until = max(self.watched_until, late + WATCHED_STEPS)

    def is_likely(self, step: int) -> bool:
        """Return whether a skip of a step is likely, as far as the host knows."""
        applied = step - 1 - (self._counts_from or 0)  # unless a skip is unknown
        has_grown = applied > 0 and applied % self._scaler.get_growth_interval() == 0
        return has_grown or step - self._skipped_at <= LIKELY_STEPS

    def note(self, step: int) -> None:
        """Note that a step was skipped."""
        self._skipped_at = max(self._skipped_at, step)
        self._counts_from = max(self._counts_from or 0, step)
