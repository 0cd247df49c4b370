"""Runs of an operator in fp32 and fp64 that judge its result. This module imports torch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.shadow.arguments import IN_FP64, in_fp32, in_fp64, map_tensors
from halfstep.shadow.facts import all_finite
from halfstep.shadow.memory import SHADOW_DTYPES
from halfstep.shadow.operators import Operator, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SecondRuns:
    """Runs of one operator with arguments of other precisions."""

    def __init__(
        self,
        func: Callable[..., object],
        operator: Operator,
        actual: Arguments,
        exact: Arguments,
        *,
        may_run: bool,
    ) -> None:
        """exact: the arguments with their shadows.  may_run: the operator changes nothing else."""
        self._func, self._operator = func, operator
        self._actual, self._exact, self._may_run = actual, exact, may_run
        self._before: Arguments | None = None

    def keep_before(self) -> None:
        """Copy the arguments in fp32 before a change in place, whose rounding is measured."""
        args, kwargs = (
            map_tensors(part, lambda t: in_fp32(t).clone(), SHADOW_DTYPES) for part in self._actual
        )
        self._before = args, kwargs

    def needs_fp32(self) -> bool:
        """Return whether the operator runs with the values of fp32, and not with its own."""
        return bool(self._run(*self._exact)) and not self._from_actual()

    def is_finite_in_fp32(self, result: Tensor, shadow: Tensor) -> bool | None:
        """Return whether fp32 would make the lost elements finite from the actual inputs."""
        exact = self._find_exact(result)
        if exact is None:
            return None
        is_lost = ~torch.isfinite(result) & torch.isfinite(shadow)
        return all_finite(exact[is_lost])

    def find_largest_in_fp64(self) -> float | None:
        """Return the largest value in fp64 if all are finite there; None if not, or unknown."""
        args, kwargs = (map_tensors(part, in_fp64, IN_FP64) for part in self._exact)
        results = [result for result in self._run(args, kwargs) if result.numel()]
        if not all(map(all_finite, results)):
            return None
        return max((float(result.abs().max()) for result in results), default=None)

    def measure_error(self, actual: Tensor) -> float:
        """Return the operator's own rounding, relative to its result."""
        exact = self._find_exact(actual)
        size = 0.0 if exact is None else float(exact.double().norm())
        if exact is None or not size or not math.isfinite(size):
            return 0.0
        distance = float((exact.double() - actual.double()).norm())
        return distance / size if math.isfinite(distance) else 0.0

    def _run(self, args: Any, kwargs: dict[str, object]) -> list[Tensor]:
        """Return the results of another run; none if it is not possible."""
        if not self._may_run:
            return []
        try:
            return tensors_in(self._func(*args, **kwargs))
        except Exception:
            return []  # there is no kernel for these dtypes

    def _from_actual(self) -> list[Tensor]:
        """Return the results in fp32 from the actual inputs."""
        if self._before is None:
            return self._run(*(map_tensors(part, in_fp32, SHADOW_DTYPES) for part in self._actual))
        try:
            self._func(*self._before[0], **self._before[1])
        except Exception:
            return []  # there is no kernel for these dtypes
        return self._operator.find_written_tensors(*self._before)

    def _find_exact(self, result: Tensor) -> Tensor | None:
        """Return a result in fp32 from the actual inputs, by its shape."""
        return next((exact for exact in self._from_actual() if exact.shape == result.shape), None)
