"""Histograms of gradient exponents by module, to compare with the range of fp16.

The exponents of a step's unscaled fp32 gradients are counted on the device and copied to the host
asynchronously; an event is polled. A scale is (nearly always) a power of two, so it only shifts the
counts: they are recorded once, unscaled, with the scale of their step, and can be drawn for any
other scale. (Values that an fp16 backward pass flushed to zero are among the zeros.)

    fp32 bits   sign (1)  exponent e (8)  fraction (23);   |x| in [2^(e-127), 2^(e-126))
    e = 0       zero or subnormal: counted as zero         e = 255: inf or NaN
    fp16        normal from 2^-14 to 65504, just under 2^16; subnormal from 2^-24

Cost of a counted step: one pass over the gradients with int64 indices, 4 million elements (32 MiB)
at a time. This module imports torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.recording.gradients import elements
from halfstep.telemetry.events import Event, Histogram, HistogramModule

BINS, BIAS = 256, 127
CHUNK = 2**22  # elements
SMALLEST, LARGEST = -24, 15  # exponents of fp16's smallest and largest numbers


class Exponents:
    """Counter of gradient exponents, by the modules that own the parameters."""

    def __init__(self, parameters: Sequence[str], device: torch.device) -> None:
        """parameters: their names, "<module>.<parameter>", in forward order."""
        modules = [name.rpartition(".")[0] for name in parameters]
        self.modules = list(dict.fromkeys(modules))  # M
        place = {module: i for i, module in enumerate(self.modules)}
        self._row = {name: place[module] for name, module in zip(parameters, modules, strict=True)}
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    @classmethod
    def together(cls, several: Sequence["Exponents"]) -> "Exponents":
        """Return an object that formats the concatenated counts of several."""
        if len(several) == 1:
            return several[0]
        whole = cls([], several[0]._one.device)
        whole.modules = [module for part in several for module in part.modules]
        return whole

    def nothing(self) -> Tensor:
        """Return zero counts for a step, (M × BINS,)."""
        size = len(self.modules) * BINS
        return torch.zeros(size, dtype=torch.int64, device=self._one.device)

    def count(
        self,
        counts: Tensor,
        gradients: Iterable[tuple[str, Tensor | None]],
        scale: Tensor | None = None,
    ) -> None:
        """Add gradients, with their parameters' names. scale: their current factor."""
        inverse = None if scale is None else scale.double().reciprocal().float()  # as in unscale_
        for name, gradient in gradients:
            if gradient is None:
                continue
            all_elements = elements(gradient.detach())
            if all_elements.is_complex():
                all_elements = torch.view_as_real(all_elements.resolve_conj())
            for part in torch.split(all_elements.reshape(-1), CHUNK):
                values = part.to(torch.float32)
                values = values if inverse is None else values * inverse
                exponents = (values.view(torch.int32) >> 23) & 0xFF
                index = exponents.to(torch.int64) + self._row[name] * BINS
                # bincount would synchronize to get the largest value
                with in_any_order():
                    counts.scatter_add_(0, index, self._one.expand_as(index))

    def event(self, step: int, scale: float, counts: Tensor) -> Event:
        """Return the histogram event of a step from its counts on the host."""
        rows = counts.view(len(self.modules), BINS).numpy()
        modules = [describe(name, own, scale) for name, own in zip(self.modules, rows, strict=True)]
        return Histogram(step=step, scale=scale, modules=modules)


@contextmanager
def in_any_order() -> Iterator[None]:
    """Allow nondeterministic order in a sum of integers, whose result does not depend on it.

    With deterministic algorithms CUDA would sort the elements first.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


def describe(name: str, counts: NDArray[np.int64], scale: float) -> HistogramModule:
    """Return a module's counts without empty bins at the ends, and its shares at this scale.

    counts: (256,), by exponent.  underflow: share of nonzero gradients that this scale leaves below
    fp16's smallest number.  near_overflow: share within a factor of four of its largest, or above.
    """
    finite, filled = counts[1:-1], np.flatnonzero(counts[1:-1])
    first, last = (filled[0], filled[-1]) if len(filled) else (0, -1)
    scaled = np.arange(len(finite)) + 1 - BIAS + np.log2(scale)  # exponents in the backward pass
    total = max(int(finite.sum()), 1)
    return HistogramModule(
        name=name,
        lowest_exponent=int(first) + 1 - BIAS,
        counts=finite[first : last + 1].tolist(),
        zeros=int(counts[0]),
        nonfinite=int(counts[-1]),
        underflow=int(finite[scaled < SMALLEST].sum()) / total,
        near_overflow=int(finite[scaled >= LARGEST - 1].sum()) / total,
    )
