"""Differences between the same tensors in two precisions. This module imports torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Mantissa bits, with the implicit one.
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


class Errors(NamedTuple):
    """Errors of some values against their reference, over all elements together."""

    error: float  # L2 norm of the difference over that of the reference
    largest: float  # largest difference over the root mean square of the reference
    cosine: float  # NaN where either is all zero or not finite
    flushed: float  # share of the elements that are 0 and not so in the reference
    saturated: float  # share at the format's largest number or beyond, less in the reference


class Sums(NamedTuple):
    """What Errors is computed from, still on the device."""

    numbers: Tensor  # (6,) float64: ‖reference‖², ‖value‖², ‖difference‖², largest, flushed, …
    elements: int


def compare(values: Sequence[Tensor | None], references: Sequence[Tensor | None]) -> Sums | None:
    """Compare tensors in pairs, as if each side were one long vector; None: no such pair.

    A missing gradient is one of zeros.
    """
    with _disable_current_modes():  # those of the pass, which would intercept each operation
        return _compare(values, references)


def _compare(values: Sequence[Tensor | None], references: Sequence[Tensor | None]) -> Sums | None:
    sums: list[Tensor] = []
    elements = 0
    for value, reference in zip(values, references, strict=True):
        if reference is None and value is None:
            continue
        value = torch.zeros_like(reference) if value is None else value  # type: ignore[arg-type]
        reference = torch.zeros_like(value) if reference is None else reference
        if value.shape != reference.shape or not reference.numel():
            continue
        sums.append(_sums(value.detach(), reference.detach()))
        elements += reference.numel()
    if not sums:
        return None
    whole = torch.stack([each.to(sums[0].device) for each in sums])
    total = whole.sum(0)
    total[3] = whole[:, 3].max()
    return Sums(total, elements)


def squared_difference(
    values: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> Tensor | None:
    """Return the squared L2 norm of the difference of tensors in pairs, on the device."""
    with _disable_current_modes():
        squares = [
            torch.linalg.vector_norm(_wide(v, o) - _wide(o, v), dtype=torch.float64).square()
            for v, o in zip(values, others, strict=True)
            if v is not None and o is not None and v.shape == o.shape
        ]
        return (
            torch.stack([each.to(squares[0].device) for each in squares]).sum() if squares else None
        )


def errors_of(sums: Sums) -> Errors:
    """Return the errors; the host waits for the device."""
    reference, value, difference, largest, flushed, saturated = sums.numbers.tolist()
    count = sums.elements
    norms = math.sqrt(reference) * math.sqrt(value)
    cosine = (reference + value - difference) / (2 * norms) if norms else math.nan
    return Errors(
        error=quotient(difference, reference),
        largest=_over(largest, math.sqrt(reference / count)),
        cosine=max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else math.nan,
        flushed=flushed / count,
        saturated=saturated / count,
    )


def quotient(squared: float, reference: float) -> float:
    """Return the relative L2 norm from two squared norms; infinity against a zero reference."""
    if math.isnan(squared):
        return math.inf
    return _over(math.sqrt(squared), math.sqrt(reference))


def bits_of(error: float, reference: torch.dtype) -> float:
    """Return the number of effective bits of a relative error, at most the reference's."""
    most = BITS[reference]
    return max(0.0, min(float(most), -math.log2(error))) if error else float(most)


def _over(number: float, by: float) -> float:
    if math.isnan(number) or math.isnan(by):
        return math.inf
    return number / by if by else (math.inf if number else 0.0)


def _wide(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in float64 if either is, else in float32."""
    is_double = torch.float64 in (tensor.dtype, other.dtype)
    return tensor.detach().to(torch.float64 if is_double else torch.float32)


def _sums(value: Tensor, reference: Tensor) -> Tensor:
    limit = torch.finfo(value.dtype).max
    own, right = _wide(value, reference), _wide(reference, value)
    difference = own - right
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        for tensor in (right, own, difference)
    ]
    largest = torch.linalg.vector_norm(difference, math.inf)
    flushed = torch.count_nonzero((own == 0) & (right != 0))
    is_beyond = ~(own.abs() < limit)  # also NaN
    saturated = torch.count_nonzero(is_beyond & (right.abs() < limit))
    return torch.stack([*norms, largest.double(), flushed.double(), saturated.double()])
