"""State of the step under way. This module imports torch."""

import math
from typing import TypeAlias

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.monitor.exponents import Exponents
from halfstep.monitor.gradients import Measured

Value: TypeAlias = float | Tensor


class CurrentStep:
    """Step state of one scaler, or of the optimizers that no scaler steps.

    Optimizers are keyed by id. Uses slots, because it is reset every step.
    """

    __slots__ = (
        "ascents",
        "counted",
        "direct",
        "found_inf",
        "has_replaced",
        "is_by_hand",
        "is_continued",
        "is_special",
        "loss",
        "losses",
        "measured",
        "number",
        "rate",
        "scale",
        "scaler",
        "stepped",
    )

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler  # keeps it alive: its id is a key
        self.number: int | None = None  # scalers are numbered in the order of their first update
        self.scale: Value = 1.0
        self.loss: Value = math.nan  # the last one written
        self.ascents = 0  # consecutive updates of the scaler before the step that they belong to
        self.is_continued = False  # the scale changed since the last row, in an ascent
        self.has_replaced = False  # this scaler replaced another one of the same optimizer
        self.is_special = False  # is_continued, has_replaced, or `direct` is not empty
        self.counted: list[tuple[Exponents, Tensor]] = []  # filled in steps with a histogram
        self.clear()

    def clear(self) -> None:
        """Reset the state for the next step."""
        self.losses: dict[int, list[Value]] = {}  # by optimizer
        self.measured: dict[int, Measured] = {}
        self.stepped: set[int] = set()  # optimizers whose step the loop called
        self.direct: set[int] = set()  # optimizers that it stepped without their scaler
        self.found_inf: dict[int, Value] = {}
        self.rate: Value | None = None
        self.is_by_hand = False  # the loop moved the weights, and no optimizer stepped


def kept_loss(loss: Value) -> Value:
    """Return a loss that later changes do not affect: a number on a CPU, else a copy."""
    if not isinstance(loss, Tensor):
        return loss
    if loss.ndim:
        loss = loss.detach().float().mean()
    return loss.item() if loss.is_cpu else loss.detach().float() + 0.0


def mean(losses: list[Value]) -> Value:
    """Return the mean of losses; NaN if there are none."""
    if len(losses) == 1:
        return losses[0]
    return sum(losses) / len(losses) if losses else math.nan
