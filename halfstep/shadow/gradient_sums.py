"""Gradients of a step, compared with their shadows. This module imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.shadow.memory import Entry
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operators import is_readable, local


@dataclass(slots=True)
class GradientSums:
    """Squared norms over the gradients of an optimizer."""

    nonfinite: list[Entry]
    shadow: float = 0.0
    lost: float = 0.0  # of the elements that are 0, and are not in the shadow
    flushed: Entry | None = None  # the first one with such elements
    distance: float = 0.0
    are_shadows_finite: bool = True


def gradient_sums(mode: ShadowMode, gradients: Sequence[Tensor]) -> GradientSums:
    """Compare gradients with their shadows."""
    sums = GradientSums([])
    for each in gradients:
        gradient = local(each).detach()
        if not is_readable(gradient):
            continue
        entry = mode.entry(gradient)
        shadow = mode.memory.shadow(gradient, entry)
        facts = mode.facts(gradient)
        if facts is not None and facts.nonfinite:
            sums.nonfinite.append(entry)
        sums.are_shadows_finite &= facts is None or not facts.shadow_nonfinite
        if entry.values is None and facts is None:  # equal to its shadow
            sums.shadow += float(gradient.double().pow(2).sum())
            continue
        exact, actual = shadow.double(), gradient.double()
        if facts is not None and (facts.nonfinite or facts.shadow_nonfinite):
            is_finite = torch.isfinite(exact) & torch.isfinite(actual)
            exact, actual = exact[is_finite], actual[is_finite]
        sums.shadow += float(exact.pow(2).sum())
        sums.distance += float((exact - actual).pow(2).sum())
        if facts is not None and facts.flushed:
            sums.lost += float(exact[actual == 0].pow(2).sum())
            sums.flushed = sums.flushed or entry
    return sums
