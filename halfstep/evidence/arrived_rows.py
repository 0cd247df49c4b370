"""Evidence from rows on the host: clipping of scaled gradients, and the first nonfinite step."""

from collections.abc import Callable

import numpy as np

from halfstep.telemetry import events
from halfstep.telemetry.events import Culprit, Event
from halfstep.telemetry.flags import NONFINITE_LOSS, NORM_OVERFLOW, SKIPPED, UNKNOWN_NORM
from halfstep.telemetry.spool import Steps

LEAST_STEPS, WINDOW = 20, 256
SHARE, NEAR = 0.95, 1e-3  # share of steps whose norm × scale is this close to their median


class BoundedNorms:
    """Detects clipping of gradients that are still multiplied by the scale.

    Their norm times the scale is then the same in steps of different scales.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._rows = np.empty((2, 0))  # norm × scale, and scale, of the latest steps
        self._due_at = LEAST_STEPS
        self.count = 0

    def read(self, records: Steps) -> None:
        """Check records in order."""
        scale, norm = records["scale"].astype(np.float64), records["grad_norm"]
        is_sound = (records["flags"] & (SKIPPED | NORM_OVERFLOW)) == 0
        is_sound &= (scale != 1) & (norm > 0)
        (sound,) = is_sound.nonzero()
        if not len(sound):
            return
        scale = scale[sound]
        rows = np.stack([norm[sound] * scale, scale])
        self._rows = np.concatenate([self._rows, rows], axis=1)[:, -WINDOW:]
        self.count += len(sound)
        products, scales = self._rows
        if self.count < self._due_at or (scales == scales[0]).all():
            return
        median = float(np.median(products))
        share = float(np.mean(np.abs(products - median) <= NEAR * median))
        if share >= SHARE and np.isfinite(median):
            self._due_at = 2 * self.count
            step = int(records["step"][sound[-1]])
            self._on_event(events.BoundedNorms(step=step, steps=len(products), norm=median))


class FirstNonfinite:
    """Reports the first nonfinite loss or gradient of a loop without a scaler."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self.is_over = False
        self._finite = 0

    def read(self, records: Steps, culprits: dict[int, list[Culprit]]) -> None:
        """Check records. culprits: parameters by step, if known from the norms."""
        if self.is_over:
            return
        has_norm = records["flags"] & UNKNOWN_NORM == 0
        bad = (records["flags"] & NONFINITE_LOSS != 0) | (
            has_norm & ~np.isfinite(records["grad_norm"])
        )
        bad &= records["scale"] == 1
        if not bad.any():
            self._finite += len(records)
            return
        first = records[np.flatnonzero(bad)[0]]
        self.is_over = True
        step = int(first["step"])
        self._on_event(
            events.FirstNonfinite(
                step=step,
                loss_nonfinite=bool(first["flags"] & NONFINITE_LOSS),
                culprits=culprits.get(step, [])[:50],
                finite=self._finite + int(np.flatnonzero(bad)[0]),
            )
        )
