"""How values depend on the loss scale, by experiment. This module imports torch.

A value has power 1 if it is proportional to the scale, as a scaled loss and its gradients are, -1
if it is proportional to the inverse, 0 if it does not depend on it, None if it depends on it in
another way, and UNKNOWN if that cannot be measured.

An operator with such inputs runs again in fp64: with its inputs as they are, where infinities, NaNs
and tensors of zeros are ones, and as they would be with another scale.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from halfstep.shadow.arguments import map_tensors
from halfstep.shadow.operations import SMALLEST_SCALE
from halfstep.shadow.operators import Operator, tensors_in

Power = float | None
UNKNOWN = math.nan
#: Another scale, relative to the current one: exact in binary, and so are its square roots.
FACTOR, FACTOR_OF_DECISIONS = 2.0**4, 2.0**16
LARGEST = 4  # a squared norm has 2
TOLERANCE = 1e-6  # relative to the largest element: an eps is no dependence
LARGEST_FACTOR = 16.0  # beyond it a factor may be an inverse scale with other factors
MOST_ELEMENTS = 10_000_000  # of all inputs
QUOTIENTS = frozenset({"div", "div_"})
#: Operators with a weight of a mean, which may equal a small inverse scale.
MEANS = frozenset({"lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_"})
PRODUCTS = QUOTIENTS | {"mul", "mul_"}
WRITES = frozenset({"copy_", "fill_"})  # the result is the second argument
#: Numbers beyond these are about the range of half precision.
RANGE = (2.0**-13, 2.0**15)
FP64 = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
FP64[torch.complex64] = torch.complex128
NUMBERS = frozenset(FP64.values())


def is_unknown(power: Power) -> bool:
    """Return whether the dependence could not be measured."""
    return power is not None and math.isnan(power)


class ScaleExperiment:
    """One operator, with the powers of its inputs and the current scale."""

    def __init__(
        self,
        func: Callable[..., object],
        operator: Operator,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        power_of: Callable[[Tensor], Power],
        is_given: Callable[[Tensor], bool],
        scale: float,
    ) -> None:
        """is_given: whether a tensor is from outside of the step, and may hold any number."""
        self._func, self._operator, self._args, self._kwargs = func, operator, args, kwargs
        self._power_of, self._is_given, self._scale = power_of, is_given, scale

    def result_power(self) -> Power:
        """Return the power of the results; None for a decision that another scale would change."""
        name = self._operator.name.removeprefix("_foreach_")
        if name.endswith("_like") or name.startswith("new_"):
            return 0
        inputs = self._args[1:] if name in WRITES else (*self._args, *self._kwargs.values())
        if name in WRITES and not torch.as_tensor(self._args[1]).any():
            return self._power_of(tensors_in(self._args[0])[0])  # zeros in a part fit any power
        powers = [self._power_of(tensor) for tensor in tensors_in(list(inputs))]
        has_scale = any(map(self._power_of_number, self._numbers()))
        if not has_scale and not any(power != 0 for power in powers):
            return 0
        if None in powers:
            return None
        known = [power for power in powers if power is not None and not is_unknown(power)]
        is_large = sum(tensor.numel() for tensor in tensors_in(list(inputs))) > MOST_ELEMENTS
        if is_large or len(known) < len(powers) or self._may_unscale(name, known):
            return UNKNOWN
        try:
            return self._measure(known)
        except Exception:  # there is no kernel for fp64
            return UNKNOWN

    def _measure(self, powers: Sequence[Power]) -> Power:
        plain = self._results(1.0)
        numbers = [result for result in plain if result.dtype in NUMBERS]
        if len(numbers) < len(plain) and not self._is_about_range():
            others = (self._results(FACTOR_OF_DECISIONS**sign) for sign in (1, -1))
            if any(_differ(plain, other) for other in others):
                return None
        if not numbers:
            return 0
        if not all(map(_is_finite, numbers)):
            return UNKNOWN
        larger, smaller = (self._results(FACTOR**sign) for sign in (1, -1))
        measured = [
            _power(*three)
            for three in zip(plain, larger, smaller, strict=True)
            if three[0].dtype in NUMBERS and bool(three[0].any())
        ]
        found = _common(measured or powers)
        is_growing = bool(measured) and found is not None and found > 0
        if is_growing and all(map(_is_finite, self._results(math.inf))):
            return None  # an overflow of a scaled gradient is hidden from the scaler
        return found

    def _results(self, factor: float) -> list[Tensor]:
        """Return the results with another scale, or an infinite one; no tensor is changed."""

        def scale_tensor(tensor: Tensor) -> Tensor:
            power = self._power_of(tensor) or 0
            if self._is_number(tensor):
                power = self._power_of_number(float(tensor))
            own = tensor.to(FP64.get(tensor.dtype, tensor.dtype), copy=True)
            if not power:
                return own
            own = torch.where(torch.isfinite(own), own, 1.0)
            if not own.any():  # as a penalty that is not yet one
                own = torch.ones_like(own)
            return torch.where(own == 0, own, own * factor**power)

        def with_numbers(value: object) -> object:
            if isinstance(value, float):
                return value * factor ** self._power_of_number(value)
            return map_tensors(value, scale_tensor, FP64)

        args = tuple(map(with_numbers, self._args))
        kwargs = {name: with_numbers(value) for name, value in self._kwargs.items()}
        outputs = self._func(*args, **kwargs)
        return self._operator.find_written_tensors(args, kwargs) or tensors_in(outputs)

    def _power_of_number(self, value: float) -> int:
        """Return the power of a number of the loop, by its value; the weight of a mean has none."""
        if self._scale < SMALLEST_SCALE or self._operator.name in MEANS:
            return 0
        return 1 if value == self._scale else -1 if value == 1.0 / self._scale else 0

    def _may_unscale(self, name: str, powers: Sequence[float]) -> bool:
        """Return whether a factor may be an inverse scale that has been computed with others."""
        if name not in PRODUCTS:
            return False
        largest = min(LARGEST_FACTOR, self._scale / 2)
        for number in self._numbers():
            if number and not self._power_of_number(number):
                factor = abs(1.0 / number if name in QUOTIENTS else number)
                if any(power > 0 for power in powers) and factor < 1.0 / largest:
                    return True
                if any(power < 0 for power in powers) and factor > largest:
                    return True
        return False

    def _is_about_range(self) -> bool:
        """Return whether a number is beyond those of usual values, such as the limit of fp16."""
        sizes = [abs(number) for number in self._numbers() if number]
        return any(not RANGE[0] <= size < RANGE[1] for size in sizes)

    def _numbers(self) -> Iterable[float]:
        """Yield the numbers among the arguments."""
        for value in (*self._args, *self._kwargs.values()):
            if isinstance(value, Tensor):
                if self._is_number(value):
                    yield float(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)

    def _is_number(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a number of the loop."""
        is_one = tensor.numel() == 1 and tensor.dtype in FP64
        return is_one and self._power_of(tensor) == 0 and self._is_given(tensor)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _differ(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether results that are no numbers, such as masks and indices, differ."""
    return any(
        not torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
        if one.dtype not in NUMBERS
    )


def _power(plain: Tensor, larger: Tensor, smaller: Tensor) -> Power:
    """Return the power of a result from its values with three scales."""
    size = float(plain.abs().max())
    ratio = float(larger.abs().max()) / size
    if not FACTOR**-LARGEST <= ratio <= FACTOR**LARGEST:
        return None
    power = round(2 * math.log(ratio, FACTOR)) / 2
    for other, factor in ((larger, FACTOR**power), (smaller, FACTOR**-power)):
        if not float((other / factor - plain).abs().max()) <= TOLERANCE * size:
            return None
    return power


def _common(powers: Sequence[Power]) -> Power:
    """Return the power of all of several tensors; UNKNOWN if they have different ones."""
    different = set(powers) - {0}
    return next(iter(different)) if len(different) == 1 else UNKNOWN if different else 0
