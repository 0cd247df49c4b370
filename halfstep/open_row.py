"""What is known of a step that is under way. This module imports torch."""

import math
from typing import TypeAlias

from torch import Tensor

from halfstep.exponents import Exponents
from halfstep.gradients import Measured

Value: TypeAlias = float | Tensor


class Mean:
    """A mean of losses, on the host or the device."""

    __slots__ = ("_sum", "count")

    def __init__(self) -> None:
        self._sum: Value = 0.0
        self.count = 0

    def add(self, loss: Value) -> None:
        """Take one more. Of a tensor on a device, the sum is one that nobody changes in place."""
        if isinstance(loss, Tensor):
            if loss.ndim:
                loss = loss.detach().float().mean()
            loss = loss.item() if loss.is_cpu else loss.detach().float()
        self._sum = loss + self._sum
        self.count += 1

    def value(self) -> Value:
        """Return it; NaN if there was none."""
        return self._sum / self.count if self.count > 1 else self._sum if self.count else math.nan


class OpenRow:
    """Optimizers go by their ids. A class of slots, for one is made each step."""

    __slots__ = ("counted", "found_inf", "loss", "measured", "rate", "scale")

    def __init__(self) -> None:
        self.loss = Mean()
        self.measured: dict[int, Measured] = {}
        self.found_inf: dict[int, Value] = {}
        self.scale: Value = 1.0
        self.rate: Value | None = None
        self.counted: list[tuple[Exponents, Tensor]] = []  # in a step that is due
