"""Sums over two tensors, compared with their definition."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.precision_lab.error_statistics import (
    CHUNK_ON_CPU,
    Errors,
    compare,
    errors_of,
    overflows,
    sum_squared_differences,
)
from tests.marks import looped

SIZES = [1000, CHUNK_ON_CPU, 2 * CHUNK_ON_CPU + 7]


def by_definition(value: Tensor, reference: Tensor) -> Errors:
    """Return the errors by definition, computed by NumPy in float64."""
    own, right = (tensor.double().flatten().numpy() for tensor in (value, reference))
    difference, limit = own - right, torch.finfo(value.dtype).max
    return Errors(
        error=float(np.linalg.norm(difference) / np.linalg.norm(right)),
        largest=float(np.abs(difference).max() / np.sqrt((right**2).mean())),
        cosine=float(own @ right / (np.linalg.norm(own) * np.linalg.norm(right))),
        flushed=float(((own == 0) & (right != 0)).mean()),
        saturated=float(((np.abs(own) == limit) & (np.abs(right) < limit)).mean()),
    )


@looped("size", SIZES)
@looped("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_those_of_the_definition(dtype: torch.dtype, size: int) -> None:
    """Errors follow the definition for rounded numbers, some flushed to zero, in one or
    several chunks.
    """
    reference = torch.randn(size) * torch.logspace(-9, 3, size)
    value = reference.to(dtype)
    value[::3] = 0
    sums = compare([value], [reference])
    assert sums is not None
    assert sums.elements == size
    own, right = errors_of(sums), by_definition(value, reference)
    assert own == pytest.approx(right, rel=1e-9)
    squared = sum_squared_differences([value], [reference])
    assert squared is not None
    expected = np.linalg.norm(value.double().numpy() - reference.double().numpy()) ** 2
    assert float(squared) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_overflow_is_counted_in_every_chunk(size: int) -> None:
    """Infinite and NaN values count as shares of all elements, and make errors infinite."""
    reference = torch.randn(size) * 1e5
    value = reference.half()
    value[-1] = math.nan
    sums = compare([value], [reference])
    assert sums is not None
    errors = errors_of(sums)
    assert 0.3 < errors.saturated < 0.7
    is_at_limit = (value.abs() == 65504) & ((value.float() - reference).abs() > 32)
    expected = (~value.isfinite() | is_at_limit).double().mean()
    assert errors.saturated == pytest.approx(float(expected))
    assert (errors.error, errors.largest) == (math.inf, math.inf)
    assert math.isnan(errors.cosine)


def test_pairs_count_as_one_vector() -> None:
    """A missing gradient counts as zeros, and transposed memory and scaled gradients compare."""
    first, second = torch.randn(5, 7), torch.randn(9)
    low = (first * 1024).bfloat16().T.contiguous().T
    sums = compare([low, None], [first, second], scale=1024.0)
    assert sums is not None
    value = torch.cat([low.float().flatten() / 1024, torch.zeros(9)])
    expected = by_definition(value, torch.cat([first.flatten(), second]))
    assert errors_of(sums) == pytest.approx(expected, rel=1e-9)
    assert compare([None], [None]) is None
    assert compare([torch.ones(2)], [torch.ones(3)]) is None


@looped(
    "value, expected",
    [(65504.0, False), (65519.0, False), (1e5, True), (-1e5, True), (math.inf, False)],
)
def test_casts_that_overflow(value: float, expected: bool) -> None:
    """An overflow is counted only where a finite number becomes infinite."""
    numbers = torch.tensor([1.0, value])
    assert bool(overflows(numbers, numbers.half())) is expected


def errors(value: Tensor, reference: Tensor, scale: float = 1.0) -> Errors:
    """Return the errors of a pair of tensors."""
    sums = compare([value], [reference], scale=scale)
    assert sums is not None
    return errors_of(sums)


@pytest.mark.parametrize("size", SIZES)
def test_equal_infinities_are_no_error(size: int) -> None:
    """Equal infinities, or equal lowest numbers of each format, do not affect other errors."""
    reference = torch.randn(size)
    rest = errors(reference.bfloat16()[2:], reference[2:])
    reference[:2] = torch.tensor([-math.inf, math.inf])
    own = errors(reference.bfloat16(), reference)
    assert (own.error, own.cosine, own.saturated) == pytest.approx((rest.error, rest.cosine, 0))
    assert 0 < own.largest < math.inf
    square = sum_squared_differences([reference.bfloat16()], [reference])
    assert square is not None
    finite = sum_squared_differences([reference.bfloat16()[2:]], [reference[2:]])
    assert finite is not None
    assert float(square) == pytest.approx(float(finite))
    reference[0] = torch.finfo(torch.float32).min
    assert errors(reference.half().clamp(-65504), reference).saturated == 0


@pytest.mark.parametrize("pair", [(1.0, math.inf), (math.inf, 1.0), (math.inf, -math.inf)])
def test_infinity_on_one_side_is_an_infinite_error(pair: tuple[float, float]) -> None:
    """Infinity against a finite number, or against the opposite infinity, is an infinite error."""
    own, right = (torch.tensor([each, 1.0]) for each in pair)
    result = errors(own.half(), right)
    assert (result.error, result.largest) == (math.inf, math.inf)
    assert math.isnan(result.cosine)


@looped("scale", [1.0, 1024.0, 1000.0])
@looped("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_at_the_limit_are_saturated(dtype: torch.dtype, scale: float) -> None:
    """The largest number in place of another one counts as saturated."""
    limit = torch.finfo(dtype).max
    value = torch.tensor([limit, -limit, limit, 1.0, 1.0], dtype=dtype)
    exact = torch.tensor([limit / 2, -2 * limit, limit, 1.0, 1.0], dtype=torch.float64) / scale
    assert errors(value, exact, scale).saturated == 2 / 5


@looped("factor", [1e-20, 1e-9, 1.0, 1e9, 1e20])
def test_cosine_does_not_depend_on_the_norms(factor: float) -> None:
    """The cosine is the same for vectors of very different lengths."""
    own, right = torch.randn(2, 1000).double()
    assert errors(own * factor, right).cosine == pytest.approx(errors(own, right).cosine, rel=1e-9)
    assert errors(right * factor, right).cosine == pytest.approx(1)


def test_equal_tensors_have_errors_of_zero() -> None:
    """All errors of equal tensors are zero, without a sign."""
    result = errors(torch.ones(3).half(), torch.ones(3))
    assert [math.copysign(1, each) for each in result] == [1] * 5
    assert result == (0, 0, 1, 0, 0)
