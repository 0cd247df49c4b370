"""Collects evidence in one watched loop from its calls, rows and armed steps.

Every method is called through `BestEffort`, so an error disables only one kind of evidence. This
module imports torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.diagnosis.zero_gradients import count_last
from halfstep.evidence.arrived_rows import BoundedNorms, FirstNonfinite
from halfstep.evidence.buffer_evidence import BufferEvidence
from halfstep.evidence.input_evidence import InputEvidence, is_finite
from halfstep.evidence.optimizer_checks import OptimizerChecks
from halfstep.evidence.precision import computing_type
from halfstep.evidence.schedule import ScheduleEvidence
from halfstep.evidence.skip_evidence import SkipEvidence
from halfstep.evidence.tally import Tally
from halfstep.recording.gradients import Gradients
from halfstep.shadow.armed_steps import ArmedSteps
from halfstep.telemetry.events import (
    AccumulatedGradients,
    Culprit,
    DirectStep,
    Event,
    GradientsDropped,
    MixedScales,
    NonfiniteGradients,
    NoStep,
    NotStepped,
    Precision,
    ScaledClip,
    Uncleared,
    UnscaledLoss,
)
from halfstep.telemetry.flags import SKIPPED, optimizer_skipped
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopies
from halfstep.watching.current_step import Value

PASSES_WITHOUT_STEP = 20
LOOK_AFTER_ZEROS = 8  # steps in a row with gradients of 0, after which some are armed
PRECISION_PASSES = (1, 2, 10, 100)  # backward passes whose graph is read


class Collector:
    """Collects evidence in the order of a step, and emits events."""

    def __init__(
        self,
        on_event: Callable[[Event], None],
        say: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """on_error: called with an error of an armed step."""
        self._on_event, self._say = on_event, say
        self.host_copies = HostCopies()
        self.armed = ArmedSteps(on_event, on_error)
        self.schedule = ScheduleEvidence()
        self.inputs = InputEvidence(on_event, self.host_copies)
        self.checks = OptimizerChecks(on_event, self._once)
        self._buffers = BufferEvidence(self._list_untrained, on_event, self.host_copies)
        self.skips = SkipEvidence(self.armed, self.inputs, self._buffers, self.host_copies)
        self._bounded = BoundedNorms(on_event)
        self._first = FirstNonfinite(on_event)
        self._first_changes = 0  # of parameters, at the first pass
        self._zero_steps = 0  # the last steps with gradients of 0
        self._tallies = {
            kind: Tally(kind, on_event)
            for kind in (DirectStep, MixedScales, NotStepped, ScaledClip, Uncleared, UnscaledLoss)
        }
        self._precisions: set[str] = set()
        self._reported: set[str] = set()

    def add(self, modules: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
        """Observe these modules."""
        for part in (self.inputs, self.checks):
            part.modules += tuple(modules)
        self.armed.add(names)

    def meet_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Check the buffers of modules as the loop has given them."""
        self._buffers.meet([named for module in modules for named in module.named_buffers()])

    def _list_untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers, and weights that no optimizer has, such as averaged ones."""
        for module in self.inputs.modules:
            yield from module.named_buffers()
        for module in self.inputs.modules:
            for name, parameter in module.named_parameters():
                if not parameter.requires_grad:
                    yield name, parameter

    def _count_changes(self) -> int:
        """Count the changes of the modules' parameters, except those by `.data`."""
        parameters = [each for module in self.inputs.modules for each in module.parameters()]
        return sum(each._version for each in parameters if not each.is_inference())

    def is_due(self, count: int, losses: list[Value] | None) -> bool:
        """Return whether to examine a backward pass. count: passes so far."""
        if count <= PRECISION_PASSES[-1] or self.inputs.found is not None:
            return True
        if self.skips.in_a_row or self.armed.is_armed:
            return True
        for loss in losses or ():  # noqa: SIM110, a generator costs calls in each step
            if isinstance(loss, float) and not math.isfinite(loss):
                return True
        return False

    def pass_begins(
        self, step: int, count: int, roots: object, losses: list[Value] | None, *, has_stepped: bool
    ) -> None:
        """Examine a backward pass. step: the current one.  count: passes so far."""
        if count in PRECISION_PASSES:
            self._read_precision(step, roots)
        if count == 1:
            self._buffers.begin()
            self._first_changes = self._count_changes()
        if count == PASSES_WITHOUT_STEP and not has_stepped:
            if all(map(is_finite, losses or ())):  # else the loop may leave such steps out
                is_by_hand = self._count_changes() > self._first_changes
                self._on_event(NoStep(step=step, passes=count, is_by_hand=is_by_hand))
            self._say(
                f"{count} backward passes without an optimizer step: steps are recorded when a "
                "torch.optim optimizer steps, or by watch.log"
            )
        if losses is None:
            return
        if any(isinstance(loss, Tensor) for loss in losses):
            is_suspected = bool(self.skips.in_a_row) or self.armed.is_armed
            self.inputs.examine(step, count, losses, is_suspected=is_suspected)
        elif not all(map(is_finite, losses)):
            self.inputs.record(step)
            self.armed.look()  # the step may be applied nevertheless
        elif self.inputs.found is not None and any(isinstance(loss, float) for loss in losses):
            self.inputs.recheck()

    def direct_step(self, step: int, optimizer: str, *, is_scaled: bool) -> None:
        """Record an optimizer step made without its scaler. is_scaled: with scaled gradients."""
        self._tallies[DirectStep].add(step, optimizer=optimizer, is_scaled=is_scaled)

    def not_stepped(self, step: int) -> None:
        """Record an update of the scaler without an optimizer step."""
        self._tallies[NotStepped].add(step)

    def record_scaled_clip(self, step: int, optimizer: str, max_norm: object) -> None:
        """Record a clip of gradients that are multiplied by the scale."""
        norm = float(max_norm) if isinstance(max_norm, int | float) else None
        self._tallies[ScaledClip].add(step, optimizer=optimizer, max_norm=norm)

    def record_unscaled_loss(self, step: int, optimizer: str) -> None:
        """Record a scaler's step whose gradients hold some of a loss without the scale."""
        self._tallies[UnscaledLoss].add(step, optimizer=optimizer)

    def record_dropped(self, step: int, count: int, scale: Tensor) -> None:
        """Record that the loop clears gradients without a step. count: times in a row."""

        def report(arrived: list[Tensor]) -> None:
            self._on_event(GradientsDropped(step=step, count=count, scale=float(arrived[0])))

        self.host_copies.send(report, scale)

    def record_mixed_scales(self, step: int, optimizer: str, first: Tensor, last: Tensor) -> None:
        """Record a step with gradients of passes between which an update may change the scale.

        first, last: the scales of the first and of the last ones.
        """

        def report(arrived: list[Tensor]) -> None:
            if float(arrived[0]) != float(arrived[1]):
                self._tallies[MixedScales].add(step, optimizer=optimizer)

        self.host_copies.send(report, first, last)

    def record_uncleared(self, step: int, optimizer: str, norms: Tensor, carried: int) -> None:
        """A pass added to gradients that nothing cleared since the last step.

        norms: of the gradients before the pass.  carried: the number of latest steps whose
        gradients included those of the step before.
        """

        def report(arrived: list[Tensor]) -> None:
            if not bool(arrived[0].isfinite().all()):
                self._tallies[Uncleared].add(step, optimizer=optimizer)
            elif carried and bool(arrived[0].any()):
                self._on_event(AccumulatedGradients(step=step, steps=carried, optimizer=optimizer))

        self.host_copies.send(report, norms)

    def receive(
        self,
        rows: Sequence[tuple[int, int, Mapping[str, bool]]],
        records: Steps,
        events: Sequence[Event],
        norms: NDArray[np.float32] | None,
        *,
        is_scaled: bool,
        may_see_rates: bool,
        is_last: bool,
    ) -> None:
        """Process rows on the host, with the scaler's events.

        norms: of each parameter's gradient by row, (N, P), of a device, whose skips are known only
        now.
        """
        self._bounded.read(records)
        before, applied = self._zero_steps, records["flags"] & SKIPPED == 0
        self._zero_steps = count_last(records["grad_norm"][applied] == 0, before)
        if before < LOOK_AFTER_ZEROS <= self._zero_steps:
            self.armed.look()
        if not is_scaled:
            self._first.read(records, _culprits(events))
        for event in self.schedule.read(
            rows, records, may_see_rates=may_see_rates, is_last=is_last
        ):
            self._on_event(event)
        if norms is not None:
            self.skips.receive(records, events, norms)
        self.host_copies.report()

    def end(self, step: int, known: Sequence[tuple[Gradients, bool]]) -> None:
        """Remove all hooks, and report the rest."""
        self.armed.stop()
        self.inputs.report()
        for tally in self._tallies.values():
            tally.flush()
        if step:
            self._buffers.read(step, at_end=True)
        for gradients, has_changed in known:
            self.checks.check_end(step, gradients, has_changed=has_changed)

    def drain(self, *, wait: bool) -> None:
        """Report completed copies from a device."""
        self.host_copies.report(wait=wait)

    def _read_precision(self, step: int, roots: object) -> None:
        dtype = computing_type(roots)
        if dtype and dtype not in self._precisions:
            self._precisions.add(dtype)
            self._on_event(Precision(step=step, dtype=dtype))

    def _once(self, event: Event) -> None:
        """Emit the first event of a kind, for each optimizer if it names one."""
        key = f"{event.tag} {getattr(event, 'optimizer', None)}"
        if key not in self._reported:
            self._reported.add(key)
            self._on_event(event)


def skips_of(
    records: Steps, names: Sequence[str], taking_part: Sequence[Sequence[bool] | None]
) -> list[Mapping[str, bool]]:
    """Return whether each optimizer was skipped, by row.

    taking_part: by row, whether each optimizer had gradients; None for all of them.
    """
    applied = dict.fromkeys(names, False)  # shared by rows without a skip
    return [
        applied
        if taking is None and not flag & SKIPPED
        else {
            name: bool(flag & optimizer_skipped(i) if i < 24 else flag & SKIPPED)
            for i, name in enumerate(names)
            if taking is None or (i < len(taking) and taking[i])
        }
        for flag, taking in zip(records["flags"].tolist(), taking_part, strict=True)
    ]


def _culprits(events: Sequence[Event]) -> dict[int, list[Culprit]]:
    culprits: dict[int, list[Culprit]] = {}
    for event in events:
        if isinstance(event, NonfiniteGradients):
            culprits.setdefault(event.step, []).extend(event.culprits)
    return culprits
