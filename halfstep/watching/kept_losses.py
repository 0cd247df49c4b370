"""Losses of the passes since the last row, by reference. This module imports torch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

#: What divides a loss by the number of its accumulated passes: loss / 4, or loss * 0.25.
DIVISIONS = ("DivBackward0", "MulBackward0")
DIVISOR_ERROR = 1e-4
COPIED_ROWS = 16  # the first ones, which show whether the loop changes its losses in place


class KeptLosses:
    """Losses as they were when a pass began, and what the loop has divided them by."""

    def __init__(self) -> None:
        #: Losses by reference since the last row, their versions, and in host memory their numbers:
        #: what changes a tensor's `.data` leaves its version.
        self.references: list[tuple[Tensor, int, object]] = []
        self.copies_until = COPIED_ROWS  # rows until which losses are copied; -1: for ever
        self.rows = 0
        self.is_settled = False  # losses are references, and the first ones did not change
        #: What the loop has divided the losses of the passes since the step by, 1 if unknown.
        self.divisor = 1.0
        self._accumulation = 1.0  # the divisor of a step that had as many passes

    def capture(self, loss: Tensor, passes: int) -> Tensor | None:
        """Return a loss without its graph, by reference; None if it is not a single number.

        The first ones are copied, and all of them where a loop changes a loss in place.
        passes: since the optimizer's last step.
        """
        try:
            if type(loss) is not Tensor or loss.ndim or is_functorch_wrapped_tensor(loss):
                return _copy_of_rare(loss)
            if not loss.is_floating_point():
                return None
            if passes or self._accumulation > 1:
                divisor = _divisor(loss)
                is_first = passes == (self._accumulation == 1)
                self.divisor = divisor if is_first or divisor == self.divisor else 1.0
            value = loss.detach()
            if self.copies_until < 0:
                return value.clone()
            number = value.tolist() if value.is_cpu else None
            self.references.append((value, value._version, number))
            return value if self.rows >= self.copies_until else value.clone()
        except Exception:  # a subclass without these methods
            return None

    def accumulation(self, losses: int) -> float:
        """Return what a step's losses were divided by to accumulate gradients, else 1.

        losses: their number.  A last step of fewer passes is divided as those before.
        """
        if losses > 1 and self.divisor == losses:
            self._accumulation = self.divisor
        return self.divisor if self.divisor == self._accumulation else 1.0

    def get(self, losses: Sequence[Tensor]) -> Sequence[float | Tensor]:
        """Return the losses of a row that is about to be written, as they were; none if unknown."""
        is_copied = self.rows < self.copies_until
        changed: dict[int, Any] = {}
        for value, version, number in self.references:
            now = value._version if number is None else value.tolist()
            before = version if number is None else number
            if now != before and not (now != now and before != before):  # NaN differs from itself
                changed[id(value)] = number
        self.references.clear()
        self.rows += 1
        self.is_settled = 0 <= self.copies_until <= self.rows
        if not changed:
            return losses
        self.copies_until, self.is_settled = -1, False
        if is_copied:
            return losses
        if None in changed.values():
            return []
        return [changed.get(id(loss), loss) for loss in losses]


def _copy_of_rare(loss: Tensor) -> Tensor | None:
    """Return a copy of a loss of a subclass, or the mean of several numbers."""
    is_traced = type(loss).__module__.startswith("torch._subclasses")  # by the compiler
    if is_traced or (type(loss) is Tensor and is_functorch_wrapped_tensor(loss)):
        return None
    placements = getattr(loss, "placements", None)
    if placements is not None:  # only a replicated DTensor has the whole value in every process
        if not all(placement.is_replicate() for placement in placements):
            return None
        loss = loss.to_local()  # type: ignore[attr-defined]
    if loss.is_complex():
        return None
    loss = loss.detach().float()
    return loss.mean() if loss.ndim else loss + 0.0


def _divisor(loss: Tensor) -> float:
    """Return the number that a loss was divided by last, 1 if by none.

    A sum that is divided is a mean, not an accumulation.
    """
    node: Any = loss.grad_fn
    name = "" if node is None else node.name()
    if node is None or name not in DIVISIONS:
        return 1.0
    try:
        saved: Any = node._raw_saved_other
        other = saved.data if saved.unpack_hook is None else None  # a hook is the loop's own
    except (AttributeError, RuntimeError):  # an older torch, or a graph that is gone
        return 1.0
    if not isinstance(other, Tensor) or other.ndim or not other.is_cpu:
        return 1.0
    before = next((function for function, _ in node.next_functions if function is not None), None)
    number = float(other)
    if before is None or before.name().startswith("SumBackward") or not number:
        return 1.0
    divisor = number if name == DIVISIONS[0] else 1 / number
    return round(divisor) if abs(divisor - round(divisor)) < DIVISOR_ERROR else 1.0
