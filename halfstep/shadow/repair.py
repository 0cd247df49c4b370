"""The loss if a line of code, and all that follows from it, computes in fp32.

This module imports torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep.shadow.arguments import adapt, in_fp32, map_tensors
from halfstep.shadow.lines import place_of_caller
from halfstep.shadow.memory import SHADOW_DTYPES, ShadowMemory
from halfstep.shadow.operators import Operator, has_numbers, is_readable, tensors_in

Line = tuple[str, int]  # file and number


class Repair:
    """The values of a step in which one line computes in fp32, from its actual inputs."""

    def __init__(self, line: Line, budget_bytes: int) -> None:
        self._line, self._memory = line, ShadowMemory(budget_bytes)

    def arguments(
        self,
        operator: Operator,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[object, object] | None:
        """Return the arguments of an operator that is of the line or follows it, else None."""
        follows = any(self._memory.has_shadow(tensor) for tensor in tensors)
        if not follows:
            place = place_of_caller()
            if (place.file, place.line) != self._line:
                return None
        for tensor in written:
            if has_numbers(tensor):
                entry = self._memory.find(tensor) or self._memory.add(tensor)
                self._memory.materialize(tensor, entry)
        own = adapt(operator, map_tensors(args, self._value, SHADOW_DTYPES))
        return own, map_tensors(kwargs, self._value, SHADOW_DTYPES)

    def follow(
        self,
        func: Callable[..., object],
        arguments: tuple[Any, Any],
        outputs: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Run the operator, and keep its results."""
        results = tensors_in(func(*arguments[0], **arguments[1]))
        if written:
            return
        for output, result in zip(outputs, results, strict=False):
            if is_readable(output) and has_numbers(output) and output.shape == result.shape:
                self._memory.assign(output, self._memory.add(output), result)

    def loss(self, tensor: Tensor) -> float | None:
        """Return a loss; None if the line is not among what led to it."""
        return float(self._value(tensor).sum()) if self._memory.has_shadow(tensor) else None

    def _value(self, tensor: Tensor) -> Tensor:
        entry = self._memory.find(tensor) if has_numbers(tensor) else None
        return in_fp32(tensor) if entry is None else self._memory.shadow(tensor, entry)
