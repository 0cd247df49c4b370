"""Clips of scaled gradients by a number of Python that was read of them, as `norm.item()`.

Such a number has no shadow: what becomes of it in Python is unknown. But a clip multiplies by
`max_norm / norm`, so that factor × norm is the same in steps with other norms. If a scaler divides
the gradients by the scale after that, the clip has bounded what is larger by the scale. A loop that
knows the scale may have taken it into account. It has not if factor × norm is the same at two
scales, or if it never reads the scale, and clips to a tiny part of the norm.
"""

import math
from dataclasses import dataclass

from halfstep.shadow.operations import Operation

MOST_READ = 10_000  # numbers of a step
#: Relative difference of products that are the same, but for an eps, and of factors that are not.
SAME, OTHER = 1e-3, 1e-2


@dataclass(frozen=True, slots=True)
class _Clip:
    """An edit of a gradient, by the id of its entry, with its factor and factor × norm."""

    entry: int
    operation: Operation
    factor: float
    product: float
    scale: float

    def repeats(self, before: "_Clip") -> bool:
        """Return whether both have clipped other norms to the same one."""
        is_same = math.isclose(self.product, before.product, rel_tol=SAME)
        return is_same and not math.isclose(self.factor, before.factor, rel_tol=OTHER)


class NumberClips:
    """Clips of the step under way and of the last one that had one."""

    def __init__(self) -> None:
        self._squares: list[float] = []  # of the scaled numbers that the loop has read
        self._reads_scale = False  # in any step
        self._clip: _Clip | None = None  # the first of the step
        self._before: _Clip | None = None

    def begin(self) -> None:
        """Begin a backward pass, whose gradients are not read yet."""
        self._before, self._clip = self._clip or self._before, None
        self._squares.clear()

    def read(self, value: float, power: float) -> None:
        """See a number that the loop reads. power: of the scale in it, 1 or 2."""
        if math.isfinite(value) and len(self._squares) < MOST_READ:
            self._squares.append(value if power == 2 else value**2)

    def read_scale(self) -> None:
        """See that the loop reads the scale."""
        self._reads_scale = True

    def edit(self, entry: int, operation: Operation, factor: float, scale: float) -> None:
        """See that a scaled gradient is multiplied by a number of Python."""
        norm = math.sqrt(sum(self._squares))
        if self._clip is None and norm > 0:
            self._clip = _Clip(entry, operation, factor, factor * norm, scale)

    def find(self, entries: set[int]) -> Operation | None:
        """Return the edit that has clipped one of some gradients, which are still scaled."""
        clip, before = self._clip, self._before
        if clip is None or before is None or clip.entry not in entries or not clip.repeats(before):
            return None
        is_tiny = abs(clip.factor) < clip.scale**-0.5
        is_unaware = clip.scale != before.scale or (is_tiny and not self._reads_scale)
        return clip.operation if is_unaware else None
