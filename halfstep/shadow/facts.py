"""Differences between a half-precision tensor and its shadow. This module imports torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Facts:
    """Counts of the elements of one tensor in which something is wrong.

    A tensor without a shadow equals it: both have the same NaNs and infinities.
    """

    elements: int
    nan: int = 0
    infinite: int = 0
    shadow_nan: int = 0
    shadow_infinite: int = 0
    lost: int = 0  # not finite, and finite in the shadow
    flushed: int = 0  # 0, and another value in the shadow
    largest: float | None = None  # largest shadow value of the lost elements
    smallest: float | None = None  # largest shadow value of the flushed elements

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.infinite

    @property
    def has_infinity(self) -> bool:
        """Whether an element or its shadow is infinite."""
        return bool(self.infinite or self.shadow_infinite)

    @property
    def shadow_nonfinite(self) -> int:
        """Number of elements whose shadow is NaN or infinite."""
        return self.shadow_nan + self.shadow_infinite


def examine(tensor: Tensor, shadow: Tensor | None) -> Facts | None:
    """Return the defects of a tensor's values, or None without any.

    shadow: of the same shape; None if it equals the tensor.
    """
    return examine_all([(tensor, shadow)])[0]


def examine_all(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> list[Facts | None]:
    """Examine tensors with their shadows, see `examine`.

    The host reads once whether anything is wrong in them: sums, and differences of counts of zeros.
    """
    found: list[Facts | None] = [None] * len(pairs)
    numbers: list[tuple[int, Tensor, Tensor | None]] = []
    values: list[Tensor] = []
    for index, (tensor, shadow) in enumerate(pairs):
        if tensor.is_complex():
            tensor, shadow = _parts(tensor), None if shadow is None else _parts(shadow)
        if tensor.is_floating_point() and tensor.numel():
            numbers.append((index, tensor, shadow))
            values += [_sum(tensor), *_differences(tensor, shadow)]
    if not values:
        return found
    on_one_device = [value.to(values[0].device) for value in values]
    read = iter(torch.stack(on_one_device).tolist())
    for index, tensor, shadow in numbers:
        is_finite = math.isfinite(next(read))
        if shadow is None:
            found[index] = None if is_finite or all_finite(tensor) else _without_shadow(tensor)
        else:
            is_shadow_finite, is_flushed = math.isfinite(next(read)), next(read) != 0
            if not is_finite or not is_shadow_finite or is_flushed:
                found[index] = _compare(tensor, shadow)
    return found


def _differences(tensor: Tensor, shadow: Tensor | None) -> list[Tensor]:
    if shadow is None:
        return []
    return [_sum(shadow), torch.count_nonzero(shadow) - torch.count_nonzero(tensor)]


def _compare(tensor: Tensor, shadow: Tensor) -> Facts | None:
    is_finite = all_finite(tensor)
    facts = Facts(tensor.numel())
    facts.nan, facts.infinite = _counts(tensor, is_finite=is_finite)
    facts.shadow_nan, facts.shadow_infinite = _counts(shadow, is_finite=all_finite(shadow))
    is_flushed = (tensor == 0) & (shadow != 0)
    facts.flushed = int(is_flushed.sum())
    if facts.flushed:
        facts.smallest = float(shadow[is_flushed].abs().max())
    if not is_finite:
        is_lost = ~torch.isfinite(tensor) & torch.isfinite(shadow)
        facts.lost = int(is_lost.sum())
        if facts.lost:
            facts.largest = float(shadow[is_lost].abs().max())
    return facts if facts.nonfinite or facts.shadow_nonfinite or facts.flushed else None


def all_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite.

    If the sum is finite, so is each summand; a sum of finite numbers may still overflow.
    """
    return math.isfinite(float(_sum(tensor))) or bool(torch.isfinite(tensor).all())


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else None)


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj())


def _without_shadow(tensor: Tensor) -> Facts:
    nan, infinite = _counts(tensor, is_finite=False)
    return Facts(tensor.numel(), nan, infinite, nan, infinite)


def _counts(tensor: Tensor, *, is_finite: bool) -> tuple[int, int]:
    """Return the numbers of NaNs and of infinities."""
    if is_finite:
        return 0, 0
    nan = int(tensor.isnan().sum())
    return nan, tensor.numel() - int(torch.isfinite(tensor).sum()) - nan
