"""Collects evidence in one watched loop from its calls, rows and armed steps.

Every method is called through `BestEffort`, so an error disables only one kind of evidence. This
module imports torch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.evidence.arrived_rows import BoundedNorms, FirstNonfinite
from halfstep.evidence.loop_inputs import counts_of, device_inputs, nonfinite_inputs
from halfstep.evidence.nonfinite_tensors import are_finite, search
from halfstep.evidence.origin import Origin, unobserved_origin
from halfstep.evidence.precision import computing_type
from halfstep.evidence.schedule import ScheduleEvidence
from halfstep.evidence.tally import Tally
from halfstep.recording.gradients import Gradients
from halfstep.telemetry.events import (
    AccumulatedGradients,
    AdamEps,
    BadInput,
    BadInputs,
    CallOrder,
    Culprit,
    DirectStep,
    Event,
    Fp16Gradients,
    NoGradient,
    NoInfChecks,
    NonfiniteBuffers,
    NonfiniteGradients,
    NoStep,
    NotStepped,
    OutsideOptimizers,
    Precision,
    ScaledClip,
    Scaler,
    Uncleared,
    UnscaledLoss,
)
from halfstep.telemetry.events import Origin as OriginEvent
from halfstep.telemetry.flags import SKIPPED, optimizer_skipped
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopies
from halfstep.watching.current_step import CurrentStep, Value

NAMES = 50  # maximum per event
PASSES_WITHOUT_STEP = 20
CLIPS_ON_DEVICE = 100  # whose norms are handed over, of a loop without a scaler
MOST_EXAMINED = 1000  # backward passes whose inputs are counted on a device
EXAMINED_SHARE = 0.1  # of the time, at most spent on that while nothing is suspected
MAX_INPUT_SEARCHES = 3  # searches of the loop's variables, each a pass over its batch
STEPS_WITHOUT_GRADIENT, STEPS_OF_A_PARAMETER = 10, 100
SKIPS_BEFORE_UNCLEARED = 2  # in a row
HALF_TYPES = (torch.float16, torch.bfloat16)
SMALLEST_HALF = 2.0**-24  # fp16's; a smaller eps is 0 in it
#: Parts of the messages with which a scaler rejects calls in the wrong order.
OF_ORDER = (
    *("unscale_() has already been called", "step() has already been called"),
    *("unscale_() is being called after step()", "_scale is None"),
)
PRECISION_PASSES = (1, 2, 10, 100)  # backward passes whose graph is read


class Collector:
    """Collects evidence in the order of a step, and emits events."""

    def __init__(self, on_event: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._on_event, self._say = on_event, say
        self.host_copies = HostCopies()
        self.origin = Origin(on_event, self.host_copies)
        self.schedule = ScheduleEvidence()
        self._bounded = BoundedNorms(on_event)
        self._first = FirstNonfinite(on_event)
        self._tallies = {
            kind: Tally(kind, on_event)
            for kind in (DirectStep, NotStepped, ScaledClip, Uncleared, UnscaledLoss)
        }
        self._modules: tuple[nn.Module, ...] = ()
        self._precisions: set[str] = set()
        self._reported: set[str] = set()
        self._input_searches = 0
        self.inputs: tuple[int, list[tuple[str, int, int]]] | None = None  # not reported yet
        self._examined_inputs: set[int] = set()  # steps, on a device
        self._examined_passes = 0
        self._examined_seconds = self._examined_since = 0.0
        self._inputs_by_design: set[str] = set()
        self._has_read_buffers = False
        self._by_design: set[str] = set()
        self._poisoned: set[str] = set()
        self._has_skipped_loss = False
        self._bad_clip_at: int | None = None  # number of steps before a nonfinite clip
        self._is_lost = False  # a step was applied after it
        self._device_clips = 0  # handed over
        self._has_outside = False  # parameters were reported that no optimizer has
        self.in_a_row = 0  # consecutive skips known to the host

    def add(self, modules: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
        """Observe these modules."""
        self._modules += tuple(modules)
        self.origin.add(names)

    # ---- Calls --------------------------------------------------------------------------------

    def is_due(self, count: int, losses: list[Value] | None) -> bool:
        """Return whether to examine a backward pass. count: passes so far."""
        if count <= PRECISION_PASSES[-1] or self.inputs is not None:
            return True
        if self.in_a_row or self.origin.is_armed:
            return True
        for loss in losses or ():  # noqa: SIM110, a generator costs calls in each step
            if isinstance(loss, float) and not math.isfinite(loss):
                return True
        return False

    def pass_begins(
        self, step: int, count: int, roots: Any, losses: list[Value] | None, *, has_stepped: bool
    ) -> None:
        """Examine a backward pass. step: the current one.  count: passes so far."""
        if count in PRECISION_PASSES:
            self._read_precision(step, roots)
        if count == 1:
            self._read_buffers(None)
        if count == PASSES_WITHOUT_STEP and not has_stepped:
            self._on_event(NoStep(step=step, passes=count))
            self._say(
                f"{count} backward passes without an optimizer step: steps are recorded when a "
                "torch.optim optimizer steps, or by watch.log"
            )
        if losses is None:
            return
        if any(isinstance(loss, Tensor) for loss in losses):
            self._examine_inputs(step, count, losses)
        elif not all(map(_is_finite, losses)):
            self._record_inputs(step)
        elif self.inputs is not None and any(isinstance(loss, float) for loss in losses):
            self._recheck_inputs()

    def direct_step(self, step: int, optimizer: str, *, is_scaled: bool) -> None:
        """Record an optimizer step made without its scaler. is_scaled: with scaled gradients."""
        self._tallies[DirectStep].add(step, optimizer=optimizer, is_scaled=is_scaled)

    def not_stepped(self, step: int) -> None:
        """Record an update of the scaler without an optimizer step."""
        self._tallies[NotStepped].add(step)

    def scaled_clip(self, step: int, optimizer: str, max_norm: Any) -> None:
        """Record a clip of gradients that are multiplied by the scale."""
        norm = float(max_norm) if isinstance(max_norm, int | float) else None
        self._tallies[ScaledClip].add(step, optimizer=optimizer, max_norm=norm)

    def unscaled_loss(self, step: int, optimizer: str) -> None:
        """Record a scaler's step whose gradients hold some of a loss without the scale."""
        self._tallies[UnscaledLoss].add(step, optimizer=optimizer)

    def clipped(self, steps: int, norm: Value, loss: Value) -> None:
        """Record that gradients of a loop without a scaler are about to be clipped.

        steps: made so far. If the loop skips the step of a nonfinite norm, its weights are
        unchanged, and the next steps are armed as after a skip.
        """
        if self._is_lost:
            return
        if isinstance(norm, float) and isinstance(loss, float):
            self._judge_clip(steps, norm, loss)
            if self._is_lost:
                return
            self.origin.end(steps + 1, 1.0, float(not math.isfinite(norm)), loss)
        elif isinstance(norm, Tensor) and (
            self._device_clips < CLIPS_ON_DEVICE or self.origin.left or self.origin.is_armed
        ):
            self._device_clips += 1
            self.origin.end(steps + 1, 1.0, (~norm.isfinite()).float(), loss)
            both = torch.stack([norm.detach().float(), _on_device(loss, norm.device)])
            self.host_copies.send(
                lambda arrived: self._judge_clip(steps, *arrived[0].tolist()), both
            )
        else:
            return
        self.origin.begin()
        self.host_copies.report()

    def _judge_clip(self, steps: int, norm: float, loss: float) -> None:
        if self._bad_clip_at not in (None, steps):  # that step was applied: the weights are lost
            self._is_lost, self._bad_clip_at = True, None
            self.origin.disarm()
            return
        self._bad_clip_at = None if math.isfinite(norm) else steps
        if not math.isfinite(norm):
            self.origin.skipped(0, 1, 1, loss_is_finite=math.isfinite(loss))

    def uncleared(self, step: int, optimizer: str, norms: Tensor, carried: int) -> None:
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

    def raised(self, step: int, method: str, error: Exception, known: Sequence[Gradients]) -> None:
        """Record an exception from a method of the scaler."""
        text = " ".join(str(error).split())[:500]
        if any(each in text for each in OF_ORDER):
            self._once(CallOrder(step=step, method=method, error=text))
        elif "No inf checks" in text:
            empty = [each.name for each in known if all(p.grad is None for p in each.parameters)]
            self._once(NoInfChecks(step=step, method=method, optimizers=empty[:NAMES], error=text))
        elif "unscale FP16 gradients" in text:
            named = [
                *(pair for each in known for pair in zip(each.names, each.parameters, strict=True)),
                # No optimizer has been measured yet if the first step raises.
                *(pair for module in self._modules for pair in module.named_parameters()),
            ]
            half = [*{name: None for name, p in named if p.dtype == torch.float16}]
            self._once(
                Fp16Gradients(step=step, count=len(half), parameters=half[:NAMES], error=text)
            )

    def meets(self, step: int, gradients: Gradients) -> None:
        """Check an optimizer when it is first measured."""
        half = [p for p in gradients.parameters if p.dtype == torch.float16]
        if not half:
            return
        for group in gradients.optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and 0 < eps < SMALLEST_HALF:
                self._once(AdamEps(step=step, optimizer=gradients.name, eps=eps, count=len(half)))
                return

    def measured(self, step: int, gradients: Gradients, *, has_changed: bool) -> None:
        """Check the measured gradients of an optimizer's step.

        has_changed: a backward pass has changed them; a step may clear them itself.
        """
        without, steps = gradients.without_gradient, gradients.steps
        if has_changed and len(without) == len(gradients.parameters):
            return
        if not without or steps not in (STEPS_WITHOUT_GRADIENT, STEPS_OF_A_PARAMETER):
            return
        needing = sum(p.requires_grad for p in gradients.parameters)
        if len(without) < needing and steps < STEPS_OF_A_PARAMETER:
            return
        names = [gradients.names[i] for i in sorted(without)]
        self._once(
            NoGradient(
                step=step,
                optimizer=gradients.name,
                parameters=names[:NAMES],
                count=len(names),
                of=needing,
                steps=steps,
            )
        )

    def outside_optimizers(
        self, step: int, names: Mapping[nn.Parameter, str], known: Sequence[Gradients]
    ) -> None:
        """Look for parameters with gradients that no optimizer has.

        An optimizer may step copies in fp32 of parameters in half precision, or of all of them.
        """
        having = [p for p in names if p.requires_grad and p.grad is not None]
        stepped = {id(p) for each in known for p in each.parameters}
        if stepped.isdisjoint(map(id, names)):
            return
        outside = [names[p] for p in having if id(p) not in stepped and p.dtype not in HALF_TYPES]
        if outside or self._has_outside:
            self._has_outside = bool(outside)
            self._on_event(
                OutsideOptimizers(step=step, count=len(outside), parameters=outside[:NAMES])
            )

    # ---- Rows ---------------------------------------------------------------------------------

    def is_for_clip(self, norm: Value) -> bool:
        """Return whether `clipped` examines gradients of this norm."""
        if self._is_lost:
            return False
        if self._bad_clip_at is not None or self.origin.left or self.origin.is_armed:
            return True
        if isinstance(norm, float):
            return not math.isfinite(norm)
        return self._device_clips < CLIPS_ON_DEVICE

    def is_quiet(self) -> bool:
        """Return whether nothing is to be examined in the next step."""
        origin = self.origin
        return not (
            self.in_a_row
            or origin.left
            or origin.is_armed
            or self.host_copies.sent
            or self.inputs is not None
        )

    def closed(
        self,
        step: int,
        row: CurrentStep,
        known: Mapping[int, Gradients],
        scale: Value,
        found_inf: Mapping[int, Value],
        loss: Value,
    ) -> None:
        """Process a closed row of a scaler. On a CPU its flags are known now."""
        flags = list(found_inf.values())
        if any(isinstance(flag, float) for flag in flags):
            loss_is_finite = not isinstance(loss, float) or math.isfinite(loss)
            self._skip(step, row, known, any(flags), loss_is_finite=loss_is_finite)
        if self.origin.is_armed:
            total = flags[0] if flags else 0.0
            for flag in flags[1:]:
                total = total + flag
            self.origin.end(step, scale, total, loss)
        self.origin.begin()
        self.host_copies.report()

    def _skip(
        self,
        step: int,
        row: CurrentStep,
        known: Mapping[int, Gradients],
        was_skipped: bool,
        *,
        loss_is_finite: bool,
    ) -> None:
        if not was_skipped:
            self.in_a_row = 0
            self.origin.applied()
            return
        self.in_a_row += 1
        counted = [
            counts for measured in row.measured.values() if (counts := measured[2]) is not None
        ]
        nan = sum(nan > 0 for counts in counted for _inf, nan in counts.values())
        infinite = sum(nan == 0 < inf for counts in counted for inf, nan in counts.values())
        total = sum(len(known[each].names) for each in row.measured if each in known)
        self.origin.skipped(infinite, nan, total, loss_is_finite=loss_is_finite)
        if not loss_is_finite:
            self._read_buffers(step)

    def arrived(
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
        if not is_scaled:
            self._first.read(records, _culprits(events))
        for event in self.schedule.read(
            rows, records, may_see_rates=may_see_rates, is_last=is_last
        ):
            self._on_event(event)
        if norms is not None:
            self._arrived_skips(records, events, norms)
        self.host_copies.report()

    def _arrived_skips(
        self, records: Steps, events: Sequence[Event], norms: NDArray[np.float32]
    ) -> None:
        """Process skips in rows of a device."""
        skips = [each for each in events if isinstance(each, Scaler) and each.kind == "skip"]
        of_step = dict(zip(records["step"].tolist(), norms, strict=True))
        for event in skips:
            nan = int(np.isnan(of_step[event.step]).sum())
            infinite = int(np.isinf(of_step[event.step]).sum())
            loss_is_finite = not event.loss_nonfinite
            self.in_a_row += 1
            self.origin.skipped(infinite, nan, norms.shape[1], loss_is_finite=loss_is_finite)
            if not loss_is_finite and event.step not in self._examined_inputs:
                self._once(unobserved_origin(event.step, float(event.scale_before)))
            self._has_skipped_loss |= not loss_is_finite
        if len(records) and not records["flags"][-1] & SKIPPED:
            self.in_a_row = 0
            self.origin.applied()
        if skips and self._has_skipped_loss:
            self._read_buffers(skips[0].step)

    def end(self, step: int, known: Sequence[tuple[Gradients, bool]]) -> None:
        """Remove all hooks, and report the rest."""
        self.origin.disarm()
        self._report_inputs()
        for tally in self._tallies.values():
            tally.flush()
        if step:
            self._read_buffers(step, at_end=True)
        for gradients, has_changed in known:
            needing = sum(p.requires_grad for p in gradients.parameters)
            if needing and len(gradients.without_gradient) == needing and gradients.steps:
                gradients.steps = STEPS_OF_A_PARAMETER
                self.measured(step, gradients, has_changed=has_changed)

    def drain(self, *, wait: bool) -> None:
        """Report completed copies from a device."""
        self.host_copies.report(wait=wait)

    # ---- Checks -------------------------------------------------------------------------------

    def _read_precision(self, step: int, roots: Any) -> None:
        dtype = computing_type(roots)
        if dtype and dtype not in self._precisions:
            self._precisions.add(dtype)
            self._on_event(Precision(step=step, dtype=dtype))

    def _record_inputs(self, step: int) -> None:
        """Record the loop's nonfinite inputs, until a finite loss shows which are intended."""
        if self._input_searches == MAX_INPUT_SEARCHES:
            self._report_inputs()
            return
        self._input_searches += 1
        if self._has_nonfinite_weights():  # they explain the loss, and no input does
            return
        if self.inputs is None and (inputs := nonfinite_inputs()):
            self.inputs = step, inputs

    def _examine_inputs(self, step: int, count: int, losses: list[Value]) -> None:
        """Count the nonfinite elements of the loop's inputs on their device, without waiting.

        The loss, which arrives with them, shows whether they are nonfinite by design. They explain
        no loss of weights that are lost: some were computed from these.
        """
        started = time.perf_counter()
        if not self._examined_passes:
            self._examined_since = started
        is_suspected = self.in_a_row or self.origin.is_armed or self.inputs is not None
        is_dear = self._examined_seconds > EXAMINED_SHARE * (started - self._examined_since)
        self._examined_passes += 1
        if self._examined_passes > MOST_EXAMINED or (is_dear and not is_suspected):
            self._examined_inputs.discard(step)
            return
        self._count_inputs(step, count, losses)
        self._examined_seconds += time.perf_counter() - started

    def _count_inputs(self, step: int, count: int, losses: list[Value]) -> None:
        device = next(loss.device for loss in losses if isinstance(loss, Tensor))
        inputs, are_all = device_inputs(device)
        is_whole = are_all and count != PRECISION_PASSES[-1]  # later passes of this step are not
        (self._examined_inputs.add if is_whole else self._examined_inputs.discard)(step)
        if not inputs:
            return
        names = list(inputs)
        total = torch.stack([_on_device(loss, device) for loss in losses]).sum()

        def report(arrived: list[Tensor]) -> None:
            counted = zip(names, arrived[0].tolist(), strict=True)
            found = [(name, inf, nan) for name, (inf, nan) in counted if inf or nan]
            loss, weights_are_finite = arrived[1].tolist()
            if weights_are_finite:
                self._judge_inputs(step, found, loss_is_finite=math.isfinite(loss))

        counts = torch.stack([counts_of(tensor) for tensor in inputs.values()])
        weights = [p for each in self._modules for p in each.parameters() if p.requires_grad]
        both = torch.stack([total, are_finite(weights, device)])
        self.host_copies.send(report, counts, both)

    def _judge_inputs(
        self, step: int, found: list[tuple[str, int, int]], *, loss_is_finite: bool
    ) -> None:
        if loss_is_finite:
            self._inputs_by_design |= {name for name, _inf, _nan in found}
            if self.inputs is not None:
                first, inputs = self.inputs
                left = [each for each in inputs if each[0] not in self._inputs_by_design]
                self.inputs = (first, left) if left else None
                self._report_inputs()
        elif self._input_searches < MAX_INPUT_SEARCHES:
            self._input_searches += 1
            new = [each for each in found if each[0] not in self._inputs_by_design]
            if new and self.inputs is None:
                self.inputs = step, new
        else:
            self._report_inputs()

    def _has_nonfinite_weights(self) -> bool:
        """Return whether a weight on the host that is trained is not finite."""
        found: list[str] = []
        weights = (
            (name, parameter)
            for module in self._modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.is_cpu
        )
        host_copies = HostCopies()
        search(weights, host_copies, found.extend)
        host_copies.report()
        return bool(found)

    def _recheck_inputs(self) -> None:
        """Drop inputs that are nonfinite by design: those that also occur with a finite loss."""
        if self.inputs is None:
            return
        step, inputs = self.inputs
        by_design = {name for name, _inf, _nan in nonfinite_inputs()}
        remaining = [each for each in inputs if each[0] not in by_design]
        self.inputs = (step, remaining) if remaining else None
        self._report_inputs()

    def _report_inputs(self) -> None:
        if self.inputs is None:
            return
        step, inputs = self.inputs
        self.inputs = None
        self._input_searches = MAX_INPUT_SEARCHES
        listed = [BadInput(name=n[:200], inf=inf, nan=nan) for n, inf, nan in inputs[:NAMES]]
        self._on_event(BadInputs(step=step, inputs=listed))

    def _read_buffers(self, step: int | None, *, at_end: bool = False) -> None:
        """Find nonfinite buffers, and nonfinite weights that no optimizer has.

        step: the skip that may have caused them; None before the first step, where they are by
        design.
        """
        is_first, self._has_read_buffers = not self._has_read_buffers, True
        if step is not None and is_first:
            return

        def report(bad: list[str]) -> None:
            if step is None:
                self._by_design = set(bad)
                return
            new = [n for n in bad if n not in self._by_design and n not in self._poisoned]
            self._poisoned.update(new)
            if new:
                shown = new[:NAMES]
                self._on_event(
                    NonfiniteBuffers(step=step, count=len(new), buffers=shown, at_end=at_end)
                )

        averaged = (
            (name, parameter)
            for module in self._modules
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        )
        buffers = (each for module in self._modules for each in module.named_buffers())
        search(chain(buffers, averaged), self.host_copies, report)

    def _once(
        self, event: NoInfChecks | Fp16Gradients | CallOrder | AdamEps | NoGradient | OriginEvent
    ) -> None:
        """Emit the first event of a kind, for each optimizer if it names one."""
        key = f"{event.tag} {getattr(event, 'optimizer', None)}"
        if key not in self._reported:
            self._reported.add(key)
            self._on_event(event)


def _is_finite(loss: Value) -> bool:
    """Return whether a loss is not known to be inf or NaN; True for a device's loss."""
    return not isinstance(loss, float) or math.isfinite(loss)


def _on_device(loss: Value, device: torch.device) -> Tensor:
    """Return a loss as an fp32 tensor without dimensions, without waiting for the device."""
    if isinstance(loss, float):
        return torch.full((), loss, device=device)
    return loss.detach().to(device, torch.float32, non_blocking=True).reshape(())


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
