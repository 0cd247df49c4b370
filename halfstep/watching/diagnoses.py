"""Optional diagnoses of a watched loop at an interval: gradient exponents and headroom.

(Layer norms, also optional, are in the rows.) In other steps each costs one comparison. A diagnosis
that raises, e.g. for lack of memory, is reported once and disabled. This module imports torch.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfstep.recording.gradients import Gradients, local_elements
from halfstep.telemetry.events import Event, FailedDiagnosis
from halfstep.watching.async_host_copy import HostCopies
from halfstep.watching.current_step import CurrentStep, Value
from halfstep.watching.exponents import Exponents
from halfstep.watching.headroom import Headroom, find_modules_to_measure, headroom_event

ERROR_CHARACTERS = 1000


class Intervals(NamedTuple):
    """Number of steps between two measurements; 0: never, None: see halfstep.recording.reader."""

    histogram: int = 0
    layers: int | None = 0
    headroom: int = 0
    norms: int = 1  # of all gradients


class Diagnoses:
    """The enabled diagnoses of a loop."""

    def __init__(
        self, every: Intervals, on_event: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        """say: called with a message when a diagnosis is disabled after an error."""
        self._every = {"histogram": every.histogram, "headroom": every.headroom}
        self._on_event, self._say = on_event, say
        self._names: dict[nn.Module, str] = {}
        self._exponents: WeakKeyDictionary[Gradients, Exponents] = WeakKeyDictionary()
        self._headroom = Headroom()
        self._host_copies = HostCopies()

    def add(self, names: Mapping[nn.Module, str]) -> None:
        """Set the names of modules."""
        self._names |= find_modules_to_measure(names)

    def starts(self, step: int) -> None:
        """Start the measurement of this step, if it is due."""
        if self._is_due("headroom", step) and self._names and not self._headroom.is_on:
            self._attempt("headroom", step, lambda: self._headroom.begin(self._names))

    def count(
        self, step: int, row: CurrentStep, gradients: Gradients, scale: Tensor | None
    ) -> None:
        """Count an optimizer's gradients, if the step is due. scale: their current factor."""
        if self._is_due("histogram", step):
            self._attempt("histogram", step, lambda: self._count(row, gradients, scale))

    def copy(self, step: int, row: CurrentStep, scale: Value) -> None:
        """Start copying the measurements of a closed step. scale: the one it used."""
        if row.counted:
            self._attempt("histogram", step, lambda: self._send_counts(step, row, scale))
            row.counted = []
        if self._headroom.is_on:
            self._headroom.end()
            self._attempt("headroom", step, lambda: self._send_headroom(step, scale))
        self.starts(step + 1)

    def report(self, *, wait: bool = False) -> None:
        """Emit events for complete copies; `wait`: wait for the device, and emit all."""
        self._host_copies.report(wait=wait)

    def end(self) -> None:
        """Remove all hooks, and add none for a step that is closed later."""
        self._every["headroom"] = 0
        self._headroom.end()

    def _is_due(self, name: str, step: int) -> bool:
        every = self._every[name]
        return every > 0 and step % every == 0

    def _count(self, row: CurrentStep, gradients: Gradients, scale: Tensor | None) -> None:
        exponents = self._exponents.get(gradients)
        if exponents is None:
            exponents = Exponents(gradients.names, gradients.device)
            self._exponents[gradients] = exponents
        counts = exponents.nothing()
        local = (
            None
            if p.grad is None
            else local_elements(p.grad).to(gradients.device, non_blocking=True)
            for p in gradients.parameters
        )
        exponents.count(counts, zip(gradients.names, local, strict=True), scale)
        row.counted.append((exponents, counts))

    def _send_counts(self, step: int, row: CurrentStep, scale: Value) -> None:
        counted, device = row.counted, row.counted[0][1].device
        counts = torch.cat([tensor.to(device, non_blocking=True) for _, tensor in counted])
        whole = Exponents.together([exponents for exponents, _ in counted])

        def report(arrived: list[Tensor]) -> None:
            self._on_event(whole.event(step, float(arrived[1]), arrived[0]))

        self._host_copies.send(report, counts, _tensor(scale, device))

    def _send_headroom(self, step: int, scale: Value) -> None:
        names, largest = self._headroom.read()

        def report(arrived: list[Tensor]) -> None:
            self._on_event(headroom_event(step, float(arrived[1]), names, arrived[0]))

        if names:
            self._host_copies.send(report, largest, _tensor(scale, largest.device))

    def _attempt(self, name: str, step: int, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._every[name] = 0
            text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
            self._say(f"{name} is disabled: {text}")
            self._on_event(FailedDiagnosis(step=step, diagnosis=name, error=text))


def _tensor(value: Value, device: torch.device) -> Tensor:
    """Return a scale as a tensor of its own, unaffected by later in-place changes."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(device, torch.float32, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)
