"""What a watched loop is asked at an interval, by wish: exponents of gradients, and headroom.

(The layers' norms, also by wish, are in the rows.) In the other steps each costs a comparison. One
that raises, for want of memory say, is told once, and asked no more. This module imports torch.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfstep.monitor.async_host_copy import HostCopies
from halfstep.monitor.current_step import CurrentStep, Value
from halfstep.monitor.exponents import Exponents
from halfstep.monitor.gradients import Gradients, local_elements
from halfstep.monitor.headroom import Headroom, evaluated_at, headroom_event
from halfstep.telemetry.spool import Event

ERROR_CHARACTERS = 1000


class Intervals(NamedTuple):
    """Every how many steps; 0: never."""

    histogram: int = 0
    layers: int = 0
    headroom: int = 0


class Diagnoses:
    """Those that are wished for."""

    def __init__(
        self, every: Intervals, on_event: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        """say: told a line for a person, when one is given up."""
        self._every = {"histogram": every.histogram, "headroom": every.headroom}
        self._on_event, self._say = on_event, say
        self._names: dict[nn.Module, str] = {}
        self._exponents: WeakKeyDictionary[Gradients, Exponents] = WeakKeyDictionary()
        self._headroom = Headroom()
        self._parcels = HostCopies()

    def add(self, names: Mapping[nn.Module, str]) -> None:
        """Call modules by these names."""
        self._names |= evaluated_at(names)

    def starts(self, step: int) -> None:
        """Look at what passes from here on, if this step is due."""
        if self._is_due("headroom", step) and self._names and not self._headroom.is_on:
            self._ask("headroom", step, lambda: self._headroom.begin(self._names))

    def measured(
        self, step: int, row: CurrentStep, gradients: Gradients, scale: Tensor | None
    ) -> None:
        """Count an optimizer's gradients, if the step is due. scale: what multiplies them yet."""
        if self._is_due("histogram", step):
            self._ask("histogram", step, lambda: self._count(row, gradients, scale))

    def closed(self, step: int, row: CurrentStep, scale: Value) -> None:
        """Send off what was measured of a step, which used this scale."""
        if row.counted:
            self._ask("histogram", step, lambda: self._send_counts(step, row, scale))
            row.counted = []
        if self._headroom.is_on:
            self._headroom.end()
            self._ask("headroom", step, lambda: self._send_headroom(step, scale))
        self.starts(step + 1)

    def report(self, *, wait: bool = False) -> None:
        """Tell what has arrived; or wait for the device, and tell all."""
        self._parcels.report(wait=wait)

    def end(self) -> None:
        """Leave torch as it was."""
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
        counts = torch.cat([each.to(device, non_blocking=True) for _, each in counted])
        whole = Exponents.together([exponents for exponents, _ in counted])

        def report(arrived: list[Tensor]) -> None:
            self._on_event(whole.event(step, float(arrived[1]), arrived[0]))

        self._parcels.send(report, counts, _tensor(scale, device))

    def _send_headroom(self, step: int, scale: Value) -> None:
        names, largest = self._headroom.measured()

        def report(arrived: list[Tensor]) -> None:
            self._on_event(headroom_event(step, float(arrived[1]), names, arrived[0]))

        if names:
            self._parcels.send(report, largest, _tensor(scale, largest.device))

    def _ask(self, name: str, step: int, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._every[name] = 0
            text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
            self._say(f"no more {name}: {text}")
            failed = {"event": "failed_diagnosis", "step": step, "diagnosis": name}
            self._on_event(failed | {"error": text})


def _tensor(value: Value, device: torch.device) -> Tensor:
    """Return a scale that nobody changes in place."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(device, torch.float32, non_blocking=True)
    return torch.full((), value, device=device)
