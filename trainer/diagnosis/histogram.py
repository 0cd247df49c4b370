"""Where a run's gradients lie against fp16's window: their exponents, module by module.

Every N steps the exponents of the unscaled fp32 gradients are counted on the device, and brought
to the host as telemetry is: by a copy behind the work already queued, and an event that is polled.
A scale is (nearly always) a power of two, so it only shifts the counts: they are recorded unscaled,
once, with the scale of their step, and can be drawn at any other. (That the backward pass ran in
fp16 at this scale shows all the same: what it flushed to zero is among the zeros.)

    fp32 bits   sign (1)  exponent e (8)  fraction (23);   |x| in [2^(e-127), 2^(e-126))
    e = 0       zero or subnormal: counted as zero         e = 255: inf or NaN
    fp16        normal from 2^-14 to 65504, just under 2^16; subnormal from 2^-24

What it costs: in each N-th step, a pass over the gradients with int64 indices, 4 million elements
(32 MiB) at a time. In the other steps nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.config import Diagnosis
from halfstep.gradients import elements
from halfstep.spool import Event
from trainer.observers import Observer
from trainer.watched import StepResult, WatchedOptimizer

BINS, BIAS = 256, 127
CHUNK = 2**22  # elements
SMALLEST, LARGEST = -24, 15  # exponents of fp16's smallest and largest numbers


class Histogram(Observer):
    """Counts in the steps that are due; otherwise costs a comparison."""

    is_diagnosis = True

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        settings: Diagnosis,
        device: torch.device,
        on_event: Callable[[Event], None],
    ) -> None:
        self._every_steps = settings.histogram_every_steps
        self._device, self._on_event = device, on_event
        names = [name for watched in optimizers.values() for name in watched.names]
        self._modules = list(dict.fromkeys(_module(name) for name in names))  # M, in forward order
        self._row = {name: self._modules.index(_module(name)) for name in names}
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._step = 0
        self._counts: Tensor | None = None  # (M × BINS,) int64, while a step is counted
        self._sent: deque[_Sample] = deque()

    def before_step(self, step: int) -> None:
        """Say which step comes."""
        self._step = step
        if self._every_steps and step % self._every_steps == 0:
            self._counts = torch.zeros(
                len(self._modules) * BINS, dtype=torch.int64, device=self._device
            )

    def unscaled(self, optimizer: WatchedOptimizer) -> None:
        """Count this optimizer's gradients, if the step is due: unscaled, not clipped yet."""
        if self._counts is None:
            return
        for name, parameter in zip(optimizer.names, optimizer.parameters, strict=True):
            if parameter.grad is None:
                continue
            for part in torch.split(elements(parameter.grad).reshape(-1), CHUNK):
                exponents = (part.to(torch.float32).view(torch.int32) >> 23) & 0xFF
                index = exponents.to(torch.int64) + self._row[name] * BINS
                # bincount would ask a GPU for the largest value.
                with in_any_order():
                    self._counts.scatter_add_(0, index, self._one.expand_as(index))

    def after_step(self, result: StepResult) -> None:
        """Send off what was counted, and report what has arrived."""
        if self._counts is not None:
            self._sent.append(_Sample.send(self._step, result.scale, self._counts))
            self._counts = None
        if self._sent and self._sent[0].has_arrived():
            self._report(self._sent.popleft())

    def drain(self) -> None:
        """Wait for the device and report what is left."""
        while self._sent:
            self._sent[0].wait()
            self._report(self._sent.popleft())

    def _report(self, sample: "_Sample") -> None:
        scale = float(sample.scale)
        rows = sample.counts.view(len(self._modules), BINS).numpy()
        modules = [
            {"name": name} | describe(counts, scale)
            for name, counts in zip(self._modules, rows, strict=True)
        ]
        event = {"event": "histogram", "step": sample.step, "scale": scale, "modules": modules}
        self._on_event(event)


@contextmanager
def in_any_order() -> Iterator[None]:
    """Let a sum of whole numbers be taken in any order, which changes no bit of it.

    Under deterministic algorithms CUDA would sort the elements first.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


def describe(counts: NDArray[np.int64], scale: float) -> dict[str, Any]:
    """Return a module's counts without the empty ends, and its shares at this scale.

    counts: (256,), by exponent.  underflow: the share, of gradients that are not zero, that a
    scale of this size leaves below fp16's smallest number; near_overflow: within a factor of four
    of its largest, or beyond.
    """
    finite, filled = counts[1:-1], np.flatnonzero(counts[1:-1])
    first, last = (filled[0], filled[-1]) if len(filled) else (0, -1)
    scaled = np.arange(len(finite)) + 1 - BIAS + np.log2(scale)  # exponents in the backward pass
    total = max(int(finite.sum()), 1)
    return {
        "lowest_exponent": int(first) + 1 - BIAS,
        "counts": finite[first : last + 1].tolist(),
        "zeros": int(counts[0]),
        "nonfinite": int(counts[-1]),
        "underflow": int(finite[scaled < SMALLEST].sum()) / total,
        "near_overflow": int(finite[scaled >= LARGEST - 1].sum()) / total,
    }


class _Sample(NamedTuple):
    """Counts on their way: host tensors, complete once the event has happened."""

    step: int
    scale: Tensor
    counts: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, step: int, scale: Tensor, counts: Tensor) -> "_Sample":
        if not counts.is_cuda:
            return cls(step, scale, counts, None)
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (scale, counts)]
        for target, source in zip(host, (scale, counts), strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(step, host[0], host[1], arrived)

    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()


def _module(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]
