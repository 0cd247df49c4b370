"""Differences between the same tensors in two precisions. This module imports torch."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Mantissa bits, with the implicit one.
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
#: Elements that are compared at once, in float64: on a CPU they fit the cache.
CHUNK_ON_CPU, CHUNK = 2**15, 2**22
#: Suspends the dispatch modes of a pass, which would intercept each operation.
without_modes = _disable_current_modes


class Errors(NamedTuple):
    """Errors of some values against their reference, over all elements together."""

    error: float  # L2 norm of the difference over that of the reference
    largest: float  # largest difference over the root mean square of the reference
    cosine: float  # NaN where either is all zero or not finite
    flushed: float  # share of the elements that are 0 and not so in the reference
    #: Share at the format's largest number or not finite, except where the reference is so too.
    saturated: float


class Sums(NamedTuple):
    """Sums from which Errors are computed, still on the device."""

    #: (7,) float64: ‖reference‖², ‖value‖², ‖difference‖², largest, flushed, saturated, product.
    numbers: Tensor
    elements: int


def compare(
    values: Sequence[Tensor | None],
    references: Sequence[Tensor | None],
    *,
    scale: float = 1.0,
) -> Sums | None:
    """Compare tensors in pairs, as if each side were one long vector; None: no such pair.

    A missing gradient is one of zeros.  Within a pass: inside of `without_modes`.
    scale: of values that are gradients of a scaled loss.
    """
    sums: list[Tensor] = []
    elements = 0
    for value, reference in zip(values, references, strict=True):
        if reference is None and value is None:
            continue
        value = torch.zeros_like(reference) if value is None else value  # type: ignore[arg-type]
        reference = torch.zeros_like(value) if reference is None else reference
        if value.shape != reference.shape or not reference.numel():
            continue
        pieces = _chunks(value, reference)
        sums.append(_total([_sums_of_chunk(own, right, scale) for own, right in pieces]))
        elements += reference.numel()
    if not sums:
        return None
    return Sums(_total(sums), elements)


def together(sums: Sequence[Sums]) -> Sums | None:
    """Return the sums over all elements; None without any."""
    if not sums:
        return None
    return Sums(_total([part.numbers for part in sums]), sum(part.elements for part in sums))


def sum_squared_differences(
    values: Sequence[Tensor | None], others: Sequence[Tensor | None], *, scale: float = 1.0
) -> Tensor | None:
    """Return the squared L2 norm of the difference of tensors in pairs, on the device.

    scale: of the values, as of `compare`.
    """
    squares = [
        _Doubles.of(own, other, scale).square
        for v, o in zip(values, others, strict=True)
        if v is not None and o is not None and v.shape == o.shape
        for own, other in _chunks(v, o)
    ]
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum() if squares else None
    )


def overflows(value: Tensor, rounded: Tensor) -> Tensor | None:
    """Return whether a cast made a finite number infinite, on the device; None: it did not."""
    if value.is_cpu and value.numel():  # whose numbers are read without waiting
        least, most = value.aminmax()
        limit = torch.finfo(rounded.dtype).max
        if float(least) >= -limit and float(most) <= limit:
            return None
    return (~rounded.isfinite() & value.isfinite()).any()


def errors_of(sums: Sums) -> Errors:
    """Return the errors; the host waits for the device."""
    reference, value, difference, largest, flushed, saturated, product = sums.numbers.tolist()
    count = sums.elements
    norms = math.sqrt(reference) * math.sqrt(value)
    cosine = product / norms if norms and math.isfinite(norms) else math.nan
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
    if not by:
        return math.inf if number else 0.0
    ratio = number / by
    return math.inf if math.isnan(ratio) else ratio  # also of a reference that is infinite


def _chunks(value: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of two tensors of one shape, a bounded number at a time."""
    size = CHUNK_ON_CPU if value.is_cpu else CHUNK
    if value.numel() <= size:
        yield value.detach().reshape(-1), other.detach().reshape(-1)
        return
    flat = (torch.split(tensor.detach().reshape(-1), size) for tensor in (value, other))
    yield from zip(*flat, strict=True)


def _total(sums: Sequence[Tensor]) -> Tensor:
    if len(sums) == 1:
        return sums[0]
    stacked = torch.stack([part.to(sums[0].device) for part in sums])
    total = stacked.sum(0)
    total[3] = stacked[:, 3].max()
    return total


class _Doubles(NamedTuple):
    """Two tensors in float64, with zeros where both are the same infinity."""

    own: Tensor
    right: Tensor
    difference: Tensor
    square: Tensor  # squared L2 norm of the difference

    @classmethod
    def of(cls, value: Tensor, reference: Tensor, scale: float) -> "_Doubles":
        own, right = value.double(), reference.double()
        if scale != 1:
            own = own / scale
        difference = own - right
        square = difference.dot(difference)
        # On a CPU, reading a number takes less time than looking for infinities.
        if not own.is_cpu or math.isnan(float(square)):
            are_equal = own.isinf() & (own == right)
            own, right = own.masked_fill(are_equal, 0), right.masked_fill(are_equal, 0)
            difference = own - right
            square = difference.dot(difference)
        return cls(own, right, difference, square)


def _sums_of_chunk(value: Tensor, reference: Tensor, scale: float) -> Tensor:
    own, right, difference, square = _Doubles.of(value, reference, scale)
    squares = [right.dot(right), own.dot(own), square]
    least, most = difference.aminmax()
    flushed = saturated = torch.zeros_like(most)
    if not value.is_cpu or int(value.count_nonzero()) < value.numel():
        flushed = ((value == 0) & (right != 0)).sum(dtype=own.dtype)
    limit, unit = torch.finfo(value.dtype).max, torch.finfo(value.dtype).eps / 2
    if not value.is_cpu or not float(squares[1]) < (limit / scale) * (limit / scale):
        # A mask of each format's own largest number is as it should be.
        is_mask = reference.abs() == torch.finfo(reference.dtype).max
        is_rounded = difference.abs() <= limit * unit / scale
        is_at_limit = (value.abs() == limit) & ~is_mask & ~is_rounded
        is_beyond = ~own.isfinite() & right.isfinite()
        saturated = (is_at_limit | is_beyond).sum(dtype=own.dtype)
    largest = torch.maximum(least.abs(), most.abs())
    return torch.stack([*squares, largest, flushed, saturated, right.dot(own)])
