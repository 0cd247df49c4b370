"""Gradients of a step, compared with their shadows. This module imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.shadow.memory import SHADOW_DTYPES, Entry
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operators import is_readable, local
from halfstep.shadow.walk import first_emptied

#: Smaller gradients than this share of the largest one may be 0 but for rounding in fp32, unless a
#: cast has made them 0.
SMALLEST = 1e-4


@dataclass(slots=True)
class GradientSums:
    """Squared norms over the gradients of an optimizer."""

    nonfinite: list[Entry]
    tensors: int = 0
    emptied: list[Entry] = field(
        default_factory=list
    )  # all of whose elements are 0, unlike in fp32
    shadow: float = 0.0
    lost: float = 0.0  # of the elements that are 0, and are not in the shadow
    flushed: Entry | None = None  # the first one with such elements
    distance: float = 0.0
    are_shadows_finite: bool = True


def gradient_sums(mode: ShadowMode, gradients: Sequence[Tensor]) -> GradientSums:
    """Compare gradients with their shadows."""
    sums = GradientSums([])
    sizes: list[tuple[float, Entry | None]] = []  # mean squares in fp32, with entries of zeros
    for whole in gradients:
        gradient = local(whole).detach()
        if not is_readable(gradient):
            continue
        entry = mode.entry(gradient)
        shadow = mode.memory.shadow(gradient, entry)
        facts = mode.facts(gradient)
        if facts is not None and facts.nonfinite:
            sums.nonfinite.append(entry)
        sums.are_shadows_finite &= facts is None or not facts.shadow_nonfinite
        if entry.values is None and facts is None:  # equal to its shadow
            square = float(gradient.double().pow(2).sum())
            sums.shadow += square
            sizes.append((square / max(gradient.numel(), 1), None))
            continue
        exact, actual = shadow.double(), gradient.double()
        if facts is not None and (facts.nonfinite or facts.shadow_nonfinite):
            is_finite = torch.isfinite(exact) & torch.isfinite(actual)
            exact, actual = exact[is_finite], actual[is_finite]
        squares = [exact.pow(2).sum(), actual.pow(2).sum(), (exact - actual).pow(2).sum()]
        square, actual_square, distance = torch.stack(squares).tolist()
        sums.shadow += square
        sizes.append((square / max(exact.numel(), 1), entry if actual_square == 0 else None))
        sums.distance += distance
        if facts is not None and facts.flushed:
            sums.lost += float(exact[actual == 0].pow(2).sum())
            sums.flushed = sums.flushed or entry
    largest = max((size for size, _ in sizes), default=0.0)
    sums.tensors = len(sizes)
    sums.emptied = [
        entry
        for size, entry in sizes
        if entry is not None and (size > SMALLEST**2 * largest or _is_emptied_by_cast(entry))
    ]
    return sums


def _is_emptied_by_cast(gradient: Entry) -> bool:
    origin = first_emptied(gradient.writers[-1])
    return origin.name == "_to_copy" and origin.dtype in SHADOW_DTYPES
