"""Replay: repeats a skipped step with its shadows in fp32, to name the operator and its values.

A batch is stored as its inputs: the sampler's position and the state of every random generator.
A skipped step does not change the weights, so repeating it with the same examples, random numbers,
buffers and scale computes the same bits, up to the first inf or NaN.

When: the host learns of a skip after the device has continued, and the next update changes the
weights. So before the update of step n + 1 the host asks whether step n was skipped: at that point
the weights are still those of step n. It waits for the answer only where a skip is likely: in the
step after the scale has grown, in the LIKELY_STEPS steps after a known skip, and in a step whose
replay was requested. (The device has a whole forward and backward pass queued meanwhile.) Elsewhere
it polls, and a skip whose flag arrives later is replayed with the current weights, which the event
says. On a CPU every flag is there at once. Watching costs copies of generator states and buffers.
Replay watches for WATCHED_STEPS after calibration, and again after each skip, until it has replayed
the configured number; not longer, because most runs are healthy.

Without a scaler the weights have changed by the time the host knows. Then only the batch of the
first step with a nonfinite loss is drawn again, to check whether it is finite itself.

Exactness: a replay is exact with one optimizer, or several that were all skipped, in one process,
not compiled. If one of several optimizers has stepped, its weights have changed. With several
devices, the first one replays its own examples, and does not find an overflow in another's. A
compiled network is replayed uncompiled. A step that was not skipped, is past, or whose flag came
late has other weights. The event reports this as `exact` and `notes`.

The run is not affected: generators, buffers, the sampler and the recipe's own state
(`Recipe.state_dict`) are restored, and gradients are not changed (`torch.autograd.grad` returns
them). Code after the last loss of a step does not run; code between two losses does, so with
several optimizers the weights are restored too. A recipe that counts its own calls in an attribute
outside of its state also counts the replay.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.run_config import RunConfig
from halfstep.telemetry.events import BadInputs, Event, LeftOut, RequestDone
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopy
from trainer.diagnosis.past_batches import PastBatches
from trainer.diagnosis.skip_history import Flags, SkipHistory
from trainer.diagnosis.step_repetition import StepRepetition, StoredStep
from trainer.observers import Observer
from trainer.optimizers import StepResult

if TYPE_CHECKING:
    from trainer.step import StepContext

INPUTS = 50  # maximum per event
SHARDED = "it is not supported with training.parallel fsdp, where no rank has all weights of a step"


class Replay(Observer):
    """Replays the first skips after calibration, and steps requested by users."""

    is_diagnosis = True

    def __init__(
        self,
        context: "StepContext",
        modules: Mapping[str, nn.Module],
        config: RunConfig,
        device: torch.device,
        on_event: Callable[[Event], None],
        left_out: list[tuple[int, int]],
        suspended: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """left_out: see PastBatches. suspended: see StepRepetition."""
        self._on_event, self._context = on_event, context
        self._repetition = StepRepetition(context, modules, device, suspended)
        self._past = PastBatches(context.batches, left_out)
        self._skips = SkipHistory(context.scaler)
        self._can_replay = context.batches.can_be_repeated
        is_possible = context.scaler.is_enabled() and self._can_replay
        self._most = config.diagnosis.replay_skips if is_possible else 0
        if any(watched.shared_with for watched in context.optimizers.values()):
            if self._most:
                on_event(LeftOut(step=0, diagnosis="replay", reason=SHARDED))
            self._most, self._can_replay = 0, False
        self._replayed = 0  # automatic replays
        self._requested: dict[int, list[int]] = {}  # requests for future steps
        self._looks_at_batch = not context.scaler.is_enabled() and self._can_replay
        self._lost_at: int | None = None  # first step with a nonfinite loss
        self._now = self._attempted = 0
        self._coming: StoredStep | None = None
        #: Steps that may have to be replayed, whose flags have not been read.
        self._waiting: deque[tuple[StoredStep, Flags]] = deque()
        self._inexact = 0  # automatic replays with other weights

    def receive(self, records: Steps) -> None:
        """Record which of the arrived steps were skipped, at what scale."""
        self._skips.receive(records)
        lost = records["step"][records["flags"] & NONFINITE_LOSS != 0]
        if len(lost) and self._looks_at_batch:
            self._looks_at_batch, self._lost_at = False, int(lost[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to replay the same skips."""
        return {
            **self._skips.state_dict(),
            "replayed": self._replayed,
            "looks_at_batch": self._looks_at_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._skips.load_state_dict(state)
        self._replayed = state["replayed"]
        self._looks_at_batch &= state.get("looks_at_batch", True)

    def before_step(self, step: int) -> None:
        """Save what this step needs for a replay, before its batch is drawn."""
        self._check_batch(step)
        self._now, self._coming = step, None
        if self._most:
            self._skips.begin(step)
        self._skips.process(step)
        watches = self._replayed < self._most and step <= self._skips.watched_until
        if watches or step in self._requested:
            self._coming = self._repetition.store(step)

    def after_step(self, result: StepResult) -> None:
        """Start copying the flags of the queued step to the host."""
        self._attempted = self._now
        is_calibrating = self._replayed < self._most and not self._skips.calibration.is_over
        if not (is_calibrating or self._coming):
            return
        found_inf = torch.stack([result.updates[name].found_inf for name in result.stepped])
        flags = Flags(self._now, HostCopy.send(found_inf))
        if is_calibrating:
            self._skips.add(flags)
        if stored := self._coming:
            self._waiting.append((stored, flags))
            stored.scale, stored.losses = result.scale.clone(), result.losses

    def drain(self) -> None:
        """Replay the last step, if it was skipped."""
        self._replay_waiting(wait=True)
        self._check_batch(self._now + 1)

    def _check_batch(self, coming: int) -> None:
        """Draw the batch of the first lost step again, and report its nonfinite tensors.

        Tensors that are also nonfinite in the batch before, which had a finite loss, are so by
        design.
        """
        step, self._lost_at = self._lost_at, None
        if step is None:
            return
        with self._repetition.restore_afterwards():
            nonfinite = self._past.find_nonfinite(step, coming)
            before = self._past.find_nonfinite(step - 1, coming)
            by_design = {tensor.name for tensor in before}
        if inputs := [tensor for tensor in nonfinite if tensor.name not in by_design]:
            self._on_event(BadInputs(step=step, inputs=inputs[:INPUTS]))

    def before_update(self) -> None:
        """Replay the previous step if it was skipped: its weights are still unchanged."""
        if self._waiting:
            last = self._waiting[-1][0].number
            self._replay_waiting(wait=last in self._requested or self._skips.is_likely(last))
        if self._waiting:  # they are of no use once the weights have changed
            self._waiting[-1][0].buffers = []

    def _replay_waiting(self, *, wait: bool) -> None:
        """Replay the skipped ones of waiting steps whose flags have arrived. wait: for all flags.

        The last of them is the step before; for earlier ones the weights have moved on.
        """
        while self._waiting:
            stored, flags = self._waiting[0]
            if not (wait or flags.copies.has_arrived()):
                return
            self._waiting.popleft()
            self._read(stored, flags.read_skipped(), is_late=stored.number < self._attempted)

    def _read(self, stored: StoredStep, skipped: Tensor, *, is_late: bool) -> None:
        """Replay a step if it was skipped or requested. skipped: by optimizer."""
        requests, notes = self._requested.pop(stored.number, []), []
        if not skipped.any():
            notes.append("the step was not skipped: the weights are those after it")
        elif not skipped.all():
            notes.append("an optimizer was not skipped: its weights are those after the step")
        if is_late:
            notes.append(f"the weights and buffers are those after step {self._attempted:,}")
        if skipped.any():
            self._skips.note(stored.number)
        if skipped.any() and not requests:
            self._inexact += is_late
            self._replayed += not is_late
        if requests or (skipped.any() and not (is_late and self._inexact > self._most)):
            self._replay(stored, notes, requests)

    def request(self, step: int, request: int) -> None:
        """Replay a requested step: a past one now, a future one after it was attempted."""
        if not self._can_replay:  # acknowledged without a replay
            self._acknowledge([request])
            return
        if step > self._now:
            self._requested.setdefault(step, []).append(request)
            return
        position = self._past.find_position(step, self._now + 1)
        if position < 0:  # before this run's data: it began from another run's checkpoint
            self._acknowledge([request])
            return
        past = StoredStep(step, position, None, [], None)
        past.scale = self._skips.scales.get(step) or self._context.scaler.get_scale()
        notes = [f"the weights are those after step {self._now:,}", "dropout masks, if any, differ"]
        if step not in self._skips.scales:
            notes.append("the scale is the current one")
        self._replay(past, notes, [request])

    def _replay(self, stored: StoredStep, notes: list[str], requests: list[int]) -> None:
        try:
            self._on_event(self._repetition.repeat(stored, notes, is_requested=bool(requests)))
        finally:  # acknowledged even after an error, which is reported separately
            self._acknowledge(requests)

    def _acknowledge(self, acknowledged: list[int]) -> None:
        for request in acknowledged:
            self._on_event(RequestDone(step=self._now, request=request))
