"""What is known of a step that is under way. This module imports torch."""

import math
from typing import TypeAlias

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.monitor.exponents import Exponents
from halfstep.monitor.gradients import Measured

Value: TypeAlias = float | Tensor


class CurrentStep:
    """That of a scaler, or of what none steps, from one step to the next.

    Optimizers go by their ids. A class of slots, for it is begun anew each step.
    """

    __slots__ = (
        "ascents",
        "counted",
        "direct",
        "found_inf",
        "has_replaced",
        "is_by_hand",
        "is_continued",
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
        self.scaler = scaler  # whose id stands for it: so it is kept alive
        self.number: int | None = None  # of the scaler, in the order in which they first updated
        self.scale: Value = 1.0
        self.loss: Value = math.nan  # that was written last
        self.ascents = 0  # updates of the scaler in a row, ahead of the step that belongs to them
        self.is_continued = False  # the scale changed since the last row, in an ascent
        self.has_replaced = False  # another scaler, which stepped the same optimizer
        self.counted: list[tuple[Exponents, Tensor]] = []  # in a step that is due
        self.clear()

    def clear(self) -> None:
        """Begin the next step."""
        self.losses: dict[int, list[Value]] = {}  # own ones of each optimizer
        self.measured: dict[int, Measured] = {}
        self.stepped: set[int] = set()  # optimizers whose step the loop called
        self.direct: set[int] = set()  # those that it stepped outside of their scaler
        self.found_inf: dict[int, Value] = {}
        self.rate: Value | None = None
        self.is_by_hand = False  # the loop moved the weights, and no optimizer stepped


def kept_loss(loss: Value) -> Value:
    """Return a loss for later: of a CPU's tensor its number, else one that nobody changes."""
    if not isinstance(loss, Tensor):
        return loss
    if loss.ndim:
        loss = loss.detach().float().mean()
    return loss.item() if loss.is_cpu else loss.detach().float() + 0.0


def mean(losses: list[Value]) -> Value:
    """Return their mean; NaN if there is none."""
    if len(losses) == 1:
        return losses[0]
    return sum(losses) / len(losses) if losses else math.nan
