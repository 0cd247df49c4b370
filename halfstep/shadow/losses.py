"""Losses of shadow steps. This module imports torch."""

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from halfstep.diagnosis.observations import LAST_LOSSES
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import Operation
from halfstep.shadow.operators import is_readable
from halfstep.shadow.scale import Power

#: The loss has grown if its last values are above this factor of the first ones' median.
GROWN, FIRST_LOSSES = 100.0, 5


@dataclass(frozen=True, slots=True)
class SeenLoss:
    """A loss as it was given to `scale` or to `backward`."""

    value: float
    shadow: float
    writer: Operation
    power: Power  # of the loss scale
    repaired: float | None  # with one line in fp32


def new_loss(mode: ShadowMode, loss: Tensor, *, is_scaled: bool) -> SeenLoss | None:
    """Return a loss of one element; None for any other tensor.

    is_scaled: it is the root of a pass, which the loop itself may have scaled.
    """
    if not loss.is_floating_point() or loss.numel() != 1 or not is_readable(loss):
        return None
    entry, detached = mode.entry(loss), loss.detach()
    writer = entry.writers[-1]
    scale = writer.loss_scale if is_scaled else 1.0
    value, shadow = float(detached.sum()) / scale, float(mode.shadow(detached).sum()) / scale
    repaired = None if mode.repair is None else mode.repair.loss(detached)
    return SeenLoss(value, shadow, writer, entry.power, repaired and repaired / scale)


class LossHistory:
    """The first and the last losses in fp32."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST_LOSSES)

    def add(self, loss: float) -> None:
        """Add a loss, if it is finite."""
        if not math.isfinite(loss):
            return
        if len(self._first) < FIRST_LOSSES:
            self._first.append(abs(loss))
        else:
            self._last.append(abs(loss))

    def usual(self) -> float:
        """Return the median of the first losses; 0 without any."""
        first = sorted(self._first)
        return first[len(first) // 2] if first else 0.0

    def growth(self) -> float | None:
        """Return the factor by which the last losses have grown; None if they have not.

        All of them have, or, if each is larger than the one before, all but the first.
        """
        usual, last = self.usual(), list(self._last)
        if len(last) < LAST_LOSSES or not usual:
            return None
        growth = (last[-2] if last == sorted(last) else min(last)) / usual
        return growth if growth > GROWN else None
