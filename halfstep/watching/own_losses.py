"""Losses of one optimizer's next step, by the passes that changed its gradients.

A change is detected by the version counters of two of its parameters' gradients, before and after a
pass; nothing on the device is read. This module imports torch.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

#: A gradient's identity and version counters; None without a gradient.
Mark: TypeAlias = tuple[int, int, int] | None


def mark(parameter: Tensor) -> Mark:
    """Return the mark of a parameter, which differs after each change of its gradient."""
    return marks((parameter,))[0]


def marks(parameters: Sequence[Tensor]) -> list[Mark]:
    """Return the marks of several parameters."""
    result: list[Mark] = []
    for parameter in parameters:  # inlined: each function call adds to every step
        gradient = parameter.grad
        if gradient is None:
            result.append(None)
        elif type(gradient) is Tensor:
            result.append((id(gradient), gradient._version, 0))
        else:
            # Accumulation changes only the version of a DTensor's local tensor, `zero_` only its
            # own.
            local = getattr(gradient, "_local_tensor", gradient)
            result.append((id(gradient), gradient._version, local._version))
    return result


class BackwardPass:
    """A pass under way or done. losses: of its roots; None if any is unknown."""

    __slots__ = ("changed", "is_scaled", "is_unscaled", "losses", "weights")

    def __init__(
        self, losses: list[Tensor] | None, *, is_scaled: bool, is_unscaled: bool = False
    ) -> None:
        """is_scaled, is_unscaled: neither is true if it is unknown."""
        self.losses, self.is_scaled, self.is_unscaled = losses, is_scaled, is_unscaled
        #: Ids of named parameters in the first iteration: those whose gradients it changed, and the
        #: weights' versions before it.
        self.changed: set[int] = set()
        self.weights: dict[int, int] = {}


class OwnLosses:
    """The losses of one optimizer's next step."""

    __slots__ = (
        "_before",
        "_mark",
        "_was_none",
        "carried",
        "has_changed",
        "is_carried",
        "is_dropped",
        "is_first",
        "is_scaled",
        "losses",
        "of_grad",
        "probes",
        "took",
        "unscaled",
        "weights",
    )

    def __init__(self, optimizer: Optimizer) -> None:
        self.losses: list[Tensor] = []
        self.of_grad: list[Tensor] = []  # from autograd.grad over its parameters
        self.has_changed = False  # a pass has changed its gradients at least once
        self.took: BackwardPass | None = None  # the pass in which it stepped
        self.is_first = True  # no pass has changed its gradients since its step
        self.is_scaled = False  # a pass that changed its gradients began from a scaled loss
        self.unscaled = 0  # passes over its gradients that began from a loss without the scale
        self.is_carried = False  # the gradients of the last step were not cleared since
        self.carried = 0  # steps in a row that were made with such gradients
        self.is_dropped = False  # those of a scaled loss before were cleared without a step
        self.weights: int | None = None  # their version at the first pass
        self._was_none = False  # the first gradient was None before the first pass
        self._before: list[Mark] = []
        self._mark: list[Mark] | None = None
        self.probes: list[Tensor] = []
        self.choose(optimizer)

    def choose(self, optimizer: Optimizer) -> None:
        """Choose the probed parameters: the first and the last one that has a gradient."""
        able = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if isinstance(p, Tensor) and p.requires_grad
        ]
        having = [p for p in able if p.grad is not None] or able
        self.probes = [having[0], having[-1]] if len(having) > 1 else having

    def begins(self) -> bool:
        """Record the gradients' marks before a pass; return whether it re-evaluates a loss.

        It does if the weights changed since the last pass without a step.
        """
        if not self.probes:
            return False
        weights = self.probes[0]._version
        self._before = now = marks(self.probes)
        if self._mark is None:
            self.weights, self._was_none = weights, now[0] is None
            return False
        is_cleared = not (any(now) and _overlap(now, self._mark))
        self.is_dropped = (
            is_cleared and self.is_scaled and not self.is_first and weights == self.weights
        )
        if is_cleared:
            self.is_scaled, self.unscaled = False, 0
        if is_cleared or self.is_first:
            self._was_none = now[0] is None
        if not self.is_first and weights != self.weights:
            return True
        self.weights = weights
        if is_cleared:
            self.losses, self.is_first, self.is_carried = [], True, False
        elif self.is_first and now == self._mark:
            self.is_carried = True
        return False

    def ends(self, done: BackwardPass, *, is_again: bool) -> bool:
        """Record the losses of a pass; return whether it changed the gradients.

        is_again: the pass re-evaluates a loss.
        """
        now = marks(self.probes)
        if now == self._before or self.took is done:
            self.has_changed |= self.took is done
            self.took = None
            return False
        self.has_changed = True
        self._mark = now
        if not is_again:
            self.is_first = False
            self.losses += done.losses or ()
        self.is_scaled |= done.is_scaled
        self.unscaled += done.is_unscaled
        return True

    def begins_at(self, versions: Mapping[int, int]) -> None:
        """Set the weights' version at the first pass. versions: by the parameters' ids."""
        if self.probes:
            self.weights = versions.get(id(self.probes[0]), self.weights)

    def has_unscaled(self) -> bool:
        """Return whether the gradients hold some of a loss that was not multiplied by the scale."""
        return self.unscaled > 0 and self.is_uncleared()

    def is_plain(self, passes: int) -> bool:
        """Return whether the next step's losses are those of all passes, over cleared gradients."""
        return self._was_none and len(self.losses) == passes and not self.of_grad

    def has_moved(self) -> bool:
        """Return whether the weights changed since the first pass of this step."""
        if not self.probes or self.weights is None:
            return False
        return self.probes[0]._version != self.weights

    def remark(self) -> None:
        """Treat gradients that a clip changed in place as unchanged."""
        if self._mark is not None:
            self._mark = marks(self.probes)

    def resumes(self, losses: list[Tensor], *, is_scaled: bool) -> None:
        """Continue after passes that were not examined. losses: of those since the step."""
        self._mark = marks(self.probes)
        if losses:
            self.losses, self.is_first, self.is_scaled = losses, False, is_scaled

    def is_uncleared(self) -> bool:
        """Return whether the first gradient is untouched since the last pass or clip."""
        return bool(
            self._mark and self._mark[0] is not None and mark(self.probes[0]) == self._mark[0]
        )

    def holds(self, inputs: Sequence[object]) -> bool:
        """Return whether a probed parameter is among the inputs."""
        return any(value is probe for probe in self.probes for value in inputs)

    def take(self, optimizer: Optimizer, under_way: BackwardPass | None) -> list[Tensor]:
        """Return the losses of the current step, and reset for the next one."""
        losses = self.losses
        if under_way is not None:
            losses, self.took = losses + list(under_way.losses or ()), under_way
        elif not losses:
            losses = self.of_grad
        if self.probes and self.probes[0].grad is None:
            self.choose(optimizer)
        self.carried = self.carried + 1 if self.is_carried else 0
        self.is_carried = False
        self.losses, self.of_grad, self.is_first, self.is_scaled = [], [], True, False
        self.unscaled = 0
        return losses


def _overlap(now: list[Mark], then: list[Mark]) -> bool:
    return any(map(_is_same, now, then))


def _is_same(now: Mark, then: Mark) -> bool:
    return now is not None and now == then
