"""Nonfinite inputs of a watched loop, found among its variables. This module imports torch."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from halfstep.evidence.loop_inputs import counts_of, device_inputs, nonfinite_inputs
from halfstep.evidence.nonfinite_tensors import are_finite, search
from halfstep.telemetry.events import BadInput, BadInputs, Event
from halfstep.watching.async_host_copy import HostCopies
from halfstep.watching.current_step import Value

NAMES = 50  # maximum per event
MOST_EXAMINED = 1000  # backward passes whose inputs are counted on a device
EXAMINED_SHARE = 0.1  # of the time, at most spent on that while nothing is suspected
MAX_INPUT_SEARCHES = 3  # searches of the loop's variables, each a pass over its batch
LAST_OF_FIRST = 100  # the backward pass after which they are not all examined


class InputEvidence:
    """Finds inputs that are not finite although a loss with them is not, either."""

    def __init__(self, on_event: Callable[[Event], None], host_copies: HostCopies) -> None:
        self._on_event, self._host_copies = on_event, host_copies
        self.modules: tuple[nn.Module, ...] = ()
        self._searches = 0
        #: Step and inputs, not reported yet.
        self.found: tuple[int, list[tuple[str, int, int]]] | None = None
        self.examined: set[int] = set()  # steps, on a device
        self._examined_passes = 0
        self._examined_seconds = self._examined_since = 0.0
        self._by_design: set[str] = set()

    def record(self, step: int) -> None:
        """Record the loop's nonfinite inputs, until a finite loss shows which are intended."""
        if self._searches == MAX_INPUT_SEARCHES:
            self.report()
            return
        self._searches += 1
        if self._has_nonfinite_weights():  # they explain the loss, and no input does
            return
        if self.found is None and (inputs := nonfinite_inputs()):
            self.found = step, inputs

    def examine(self, step: int, count: int, losses: list[Value], *, is_suspected: bool) -> None:
        """Count the nonfinite elements of the loop's inputs on their device, without waiting.

        The loss, which arrives with them, shows whether they are nonfinite by design. They explain
        no loss of weights that are lost: some were computed from these.
        """
        started = time.perf_counter()
        if not self._examined_passes:
            self._examined_since = started
        is_suspected = is_suspected or self.found is not None
        is_dear = self._examined_seconds > EXAMINED_SHARE * (started - self._examined_since)
        self._examined_passes += 1
        if self._examined_passes > MOST_EXAMINED or (is_dear and not is_suspected):
            self.examined.discard(step)
            return
        self._count(step, count, losses)
        self._examined_seconds += time.perf_counter() - started

    def _count(self, step: int, count: int, losses: list[Value]) -> None:
        device = next(loss.device for loss in losses if isinstance(loss, Tensor))
        inputs, are_all = device_inputs(device)
        is_whole = are_all and count != LAST_OF_FIRST  # later passes of this step are not
        (self.examined.add if is_whole else self.examined.discard)(step)
        if not inputs:
            return
        names = list(inputs)
        total = torch.stack([on_device(loss, device) for loss in losses]).sum()

        def judge(arrived: list[Tensor]) -> None:
            counted = zip(names, arrived[0].tolist(), strict=True)
            found = [(name, inf, nan) for name, (inf, nan) in counted if inf or nan]
            loss, weights_are_finite = arrived[1].tolist()
            if weights_are_finite:
                self._judge(step, found, loss_is_finite=math.isfinite(loss))

        counts = torch.stack([counts_of(tensor) for tensor in inputs.values()])
        weights = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        both = torch.stack([total, are_finite(weights, device)])
        self._host_copies.send(judge, counts, both)

    def _judge(self, step: int, found: list[tuple[str, int, int]], *, loss_is_finite: bool) -> None:
        if loss_is_finite:
            self._by_design |= {name for name, _inf, _nan in found}
            if self.found is not None:
                first, inputs = self.found
                left = [entry for entry in inputs if entry[0] not in self._by_design]
                self.found = (first, left) if left else None
                self.report()
        elif self._searches < MAX_INPUT_SEARCHES:
            self._searches += 1
            new = [entry for entry in found if entry[0] not in self._by_design]
            if new and self.found is None:
                self.found = step, new
        else:
            self.report()

    def _has_nonfinite_weights(self) -> bool:
        """Return whether a weight on the host that is trained is not finite."""
        found: list[str] = []
        weights = (
            (name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.is_cpu
        )
        host_copies = HostCopies()
        search(weights, host_copies, found.extend)
        host_copies.report()
        return bool(found)

    def recheck(self) -> None:
        """Drop inputs that are nonfinite by design: those that also occur with a finite loss."""
        if self.found is None:
            return
        step, inputs = self.found
        by_design = {name for name, _inf, _nan in nonfinite_inputs()}
        remaining = [entry for entry in inputs if entry[0] not in by_design]
        self.found = (step, remaining) if remaining else None
        self.report()

    def report(self) -> None:
        """Report what was found."""
        if self.found is None:
            return
        step, inputs = self.found
        self.found = None
        self._searches = MAX_INPUT_SEARCHES
        listed = [BadInput(name=n[:200], inf=inf, nan=nan) for n, inf, nan in inputs[:NAMES]]
        self._on_event(BadInputs(step=step, inputs=listed))


def is_finite(loss: Value) -> bool:
    """Return whether a loss is not known to be inf or NaN; True for a device's loss."""
    return not isinstance(loss, float) or math.isfinite(loss)


def on_device(loss: Value, device: torch.device) -> Tensor:
    """Return a loss as an fp32 tensor without dimensions, without waiting for the device."""
    if isinstance(loss, float):
        return torch.full((), loss, dtype=torch.float32, device=device)
    return loss.detach().to(device, torch.float32, non_blocking=True).reshape(())
