"""Gradients as they were before a clip, while no optimizer is known that has them.

The first step makes an optimizer known; by then its gradients have been clipped.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.watching.current_step import ClipOfStep

#: Clips without an observed step, after which no further one is measured.
MOST_CLIPS = 16


class BeforeClip(NamedTuple):
    """Norm of a parameter's gradient before a clip."""

    norm: Tensor
    max_norm: object
    scale: Tensor | None  # the factor that the gradient includes
    nonfinite: tuple[int, int] | None = None  # elements that are inf, and NaN, on a CPU
    clipped: weakref.ref[Tensor] | None = None  # the gradient, and its version after the clip
    version: int = 0
    step: ClipOfStep | None = None  # the clip; None if its norm is another

    def is_current(self, gradient: Tensor) -> bool:
        """Return whether a gradient is as the clip has left it."""
        is_same = self.clipped is not None and self.clipped() is gradient
        return is_same and gradient._version == self.version


class FirstClips:
    """Norms before the clips of the first iterations, by a parameter's id."""

    def __init__(self) -> None:
        self.known: dict[int, BeforeClip] = {}
        self._clipped: list[Tensor] = []  # parameters of the clip that goes on
        self._clips = 0

    def measure(
        self,
        parameters: Sequence[Tensor],
        max_norm: object,
        scale: Tensor | None,
        norms: Sequence[Tensor] | None,
        clip: ClipOfStep | None,
    ) -> None:
        """Measure gradients that are about to be clipped.

        norms: those that the clip computed.  clip: None if it is not by the L2 norm.
        """
        self._clips += 1
        if self._clips <= MOST_CLIPS:
            self._clipped = [p for p in parameters if p.grad is not None]
            known = norms or _norms(self._clipped)
            for parameter, norm in zip(self._clipped, known, strict=False):
                gradient = parameter.grad
                counts = None
                if norm.is_cpu and not math.isfinite(norm) and gradient is not None:
                    counts = int(gradient.isinf().sum()), int(gradient.isnan().sum())
                self.known[id(parameter)] = BeforeClip(norm, max_norm, scale, counts, step=clip)

    def on_clip(self) -> None:
        """Remember which gradients the clip has left; any other value is measured again."""
        for parameter in self._clipped:
            if (before := self.known.get(id(parameter))) and (grad := parameter.grad) is not None:
                clipped = before._replace(clipped=weakref.ref(grad), version=grad._version)
                self.known[id(parameter)] = clipped
        self._clipped = []

    def take(self, parameters: Iterable[Tensor]) -> list[BeforeClip]:
        """Return the norms of an optimizer's gradients; empty unless all are known and current."""
        taken: list[BeforeClip] = []
        is_known = bool(self.known)
        for parameter in parameters if is_known else ():
            if (grad := parameter.grad) is not None:
                before = self.known.pop(id(parameter), None)
                if before is None or not before.is_current(grad):
                    is_known = False
                else:
                    taken.append(before)
        if is_known:
            self._clips = 0
        return taken if is_known else []

    def forget(self) -> None:
        """Drop what no optimizer has taken."""
        self.known.clear()


def _norms(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each parameter's gradient; empty if some are of rare kinds."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    is_rare = any(hasattr(g, "to_local") or g.is_sparse or g.is_complex() for g in gradients)
    kinds = {gradient.dtype for gradient in gradients}
    has_half = bool(kinds & {torch.float16, torch.bfloat16})
    if is_rare or (has_half and torch.float64 in kinds) or len({g.device for g in gradients}) != 1:
        return ()
    return torch._foreach_norm(gradients, dtype=torch.float32 if has_half else None)
