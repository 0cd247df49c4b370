"""Passes of the first iteration, before the optimizers are known. This module imports torch."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from halfstep.watching.own_losses import BackwardPass, Mark, OwnLosses, mark

MOST_PASSES = 64


class FirstIteration:
    """Which named parameters' gradients each pass has changed."""

    def __init__(self, named: Callable[[], Iterable[Tensor]]) -> None:
        """named: returns the named parameters."""
        self.named = named
        self._passes: list[BackwardPass] = []
        self._marks: dict[int, Mark] = {}
        self.is_over = False

    def begins(self, under_way: BackwardPass | None) -> None:
        """Drop parameters whose gradients were cleared since from earlier passes."""
        marks = self._mark()
        cleared = {key for key, now in marks.items() if now != self._marks.get(key)}
        versions = {id(p): p._version for p in self.named()}
        for earlier in self._passes:
            # If the weights changed as well, the starting pass re-evaluates its loss.
            earlier.changed -= {key for key in cleared if earlier.weights.get(key) == versions[key]}
        self._marks = marks
        if under_way is not None:
            under_way.weights = versions

    def ends(self, done: BackwardPass) -> None:
        """Record a pass."""
        marks = self._mark()
        done.changed = {key for key, now in marks.items() if now != self._marks.get(key)}
        self._marks = marks
        self._passes.append(done)
        if len(self._passes) > MOST_PASSES:
            self.end()

    def remark(self) -> None:
        """Treat gradients that a clip changed in place as unchanged."""
        self._marks = self._mark()

    def end(self) -> None:
        """Forget the passes: a later iteration begins, or an optimizer of this one is gone."""
        self._passes, self._marks, self.is_over = [], {}, True

    def losses_of(self, optimizer: Optimizer, known: OwnLosses) -> list[Tensor] | None:
        """Return the losses of an optimizer's first step; None if they are unknown."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._passes or not own & self._marks.keys():
            return None
        passes = [earlier for earlier in self._passes if own & earlier.changed]
        if not passes:
            return []
        key = min(own & passes[0].weights.keys())
        known.begins_at(passes[0].weights)
        same = [earlier for earlier in passes if earlier.weights.get(key) == passes[0].weights[key]]
        return [loss for earlier in same for loss in earlier.losses or ()]

    def _mark(self) -> dict[int, Mark]:
        return {id(p): mark(p) for p in self.named()}
