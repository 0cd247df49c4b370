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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.diagnosis.defect import Defect, Site
from halfstep.diagnosis.observations import EXPLAINING_SKIPS
from halfstep.evidence.loop_inputs import nonfinite_tensors
from halfstep.recording.gradients import count_nonfinite, module_names
from halfstep.recording.ring import RING_ROWS
from halfstep.run_config import RunConfig
from halfstep.shadow.armed_steps import recordable
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.telemetry import events
from halfstep.telemetry.events import (
    BadInput,
    BadInputs,
    Event,
    LeftOut,
    ReplayCulprit,
    RequestDone,
)
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopy
from trainer.checkpoints.checkpoint import random_state, restore_random_state
from trainer.data.batches import Batches
from trainer.distributed.ranks import Ranks
from trainer.observers import Observer
from trainer.optimizers import StepResult
from trainer.precision.scale_policies import Calibration

if TYPE_CHECKING:
    from trainer.step import StepContext

OUTSIDE = "training_step"  # outside of any module's call: mostly the loss
SCALES_KEPT = 1000  # scales of skipped steps, for requested replays
#: Number of steps to watch: the default growth interval of a scale, and some more.
WATCHED_STEPS = 2500
#: Consecutive skips, more than lead from 2^24 to 16: a cause other than the scale is likely.
LONG_SEARCH = 20
#: Steps after a known skip in which another one is likely.
LIKELY_STEPS = 10
#: After calibration, skips are read as late as any row of the ring.
ROW_LATE_STEPS = RING_ROWS + 1
INPUTS = 50  # maximum per event
SHARDED = "it is not supported with training.parallel fsdp, where no rank has all weights of a step"


class _Flags(NamedTuple):
    """Skip flags of the optimizers of a step that took part, (O,) on their way to the host."""

    step: int
    copies: HostCopy

    def read_skipped(self) -> Tensor:
        """Wait for the flags; return (O,) bool."""
        self.copies.wait()
        return self.copies.tensors[0] != 0


@dataclass
class _Step:
    """Data needed to repeat a step."""

    number: int
    position: int  # of the sampler, before the step
    random: dict[str, Any] | None  # None: unknown
    buffers: list[Tensor]
    state: dict[str, Any] | None  # the recipe's own; None: unknown
    scale: Tensor | float = 1.0
    losses: int | None = None  # number of times training_step yielded; None: unknown
    flags: _Flags | None = None


class Replay(Observer):
    """Replays the first skips after calibration, and steps requested by users."""

    is_diagnosis = True

    def __init__(
        self,
        context: "StepContext",
        modules: Mapping[str, nn.Module],
        batches: Batches,
        config: RunConfig[Any],
        device: torch.device,
        on_event: Callable[[Event], None],
        left_out: list[tuple[int, int]],
        suspended: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """left_out: for each rollback a step and the number of examples skipped after it.

        May grow.

        suspended: suspends the observers of a step's work.
        """
        self._left_out, self._suspended = left_out, suspended
        self._context, self._modules = context, dict(modules)
        self._batches, self._device, self._on_event = batches, device, on_event
        is_possible = context.scaler.is_enabled() and batches.can_be_repeated
        self._most = config.diagnosis.replay_skips if is_possible else 0
        self._can_replay = batches.can_be_repeated
        if any(watched.shared_with for watched in context.optimizers.values()):
            if self._most:
                on_event(LeftOut(step=0, diagnosis="replay", reason=SHARDED))
            self._most, self._can_replay = 0, False
        self._replayed = 0  # automatic replays
        self._calibration = Calibration()
        #: As far as the host knows: the last skipped step, and the one from which the scaler counts
        #: to its next growth; None until the first step.
        self._skipped_at = -LIKELY_STEPS
        self._counts_from: int | None = None
        self._flags: deque[_Flags] = deque()  # until calibration is over
        # Skipped steps that have arrived, processed some steps later.
        self._arrived_skips: deque[int] = deque()
        self._watched_until = 0  # last step to watch
        self._scales: dict[int, float] = {}  # of skipped steps
        self._requested: dict[int, list[int]] = {}  # requests for future steps
        self._looks_at_batch = not context.scaler.is_enabled() and self._can_replay
        self._lost_at: int | None = None  # first step with a nonfinite loss
        self._now = self._attempted = 0
        self._coming: _Step | None = None
        #: Steps that may have to be replayed, whose flags have not been read.
        self._waiting: deque[_Step] = deque()
        self._inexact = 0  # automatic replays with other weights

    def receive(self, records: Steps) -> None:
        """Record which of the arrived steps were skipped, at what scale."""
        for record in records[records["flags"] & SKIPPED != 0]:
            self._arrived_skips.append(int(record["step"]))
            self._scales[int(record["step"])] = float(record["scale"])
            self._note_skip(int(record["step"]))
        lost = records["step"][records["flags"] & NONFINITE_LOSS != 0]
        if len(lost) and self._looks_at_batch:
            self._looks_at_batch, self._lost_at = False, int(lost[0])
        while len(self._scales) > SCALES_KEPT:
            del self._scales[next(iter(self._scales))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to replay the same skips."""
        return {
            "calibration": self._calibration.state_dict(),
            "replayed": self._replayed,
            "scales": self._scales,
            "heard": list(self._arrived_skips),
            "watched_until": self._watched_until,
            "looks_at_batch": self._looks_at_batch,
            "flags": [(flags.step, bool(flags.read_skipped().any())) for flags in self._flags],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._counts_from = None
        self._calibration.load_state_dict(state["calibration"])
        self._replayed, self._scales = state["replayed"], dict(state["scales"])
        self._arrived_skips = deque(state.get("heard", ()))
        self._watched_until = state.get("watched_until", 0)
        self._looks_at_batch &= state.get("looks_at_batch", True)
        self._flags = deque(
            _Flags(step, HostCopy.send(torch.tensor([float(skipped)], device="cpu")))
            for step, skipped in state.get("flags", ())
        )

    def before_step(self, step: int) -> None:
        """Save what this step needs for a replay, before its batch is drawn."""
        self._check_batch(step)
        self._now, self._coming = step, None
        if self._counts_from is None and self._most:
            self._counts_from = step - 1 - self._context.scaler._init_growth_tracker
        self._process_skips()
        watches = self._replayed < self._most and step <= self._watched_until
        if watches or step in self._requested:
            self._coming = _Step(
                step,
                self._batches.position,
                random_state(self._device),
                [buffer.clone() for buffer in self._buffers()],
                deepcopy(self._context.recipe.state_dict()),
            )

    def _process_skips(self) -> None:
        """Process skips that have arrived: after calibration, a fixed number of steps late."""
        while self._flags and self._flags[0].copies.has_arrived():
            flags = self._flags.popleft()
            if was_skipped := bool(flags.read_skipped().any()):
                self._note_skip(flags.step)
            self._calibration.count(was_skipped)
            if self._calibration.skipped_in_a_row == LONG_SEARCH:  # it will not find a scale
                self._watched_until = max(self._watched_until, self._now + WATCHED_STEPS)
            if self._calibration.is_over:
                self._watched_until = self._now + WATCHED_STEPS
                self._flags.clear()
        while self._arrived_skips and self._arrived_skips[0] <= self._now - ROW_LATE_STEPS:
            late = self._arrived_skips.popleft() + ROW_LATE_STEPS
            if self._calibration.is_over:
                self._watched_until = max(self._watched_until, late + WATCHED_STEPS)

    def after_step(self, result: StepResult) -> None:
        """Start copying the flags of the queued step to the host."""
        self._attempted = self._now
        is_calibrating = self._replayed < self._most and not self._calibration.is_over
        if not (is_calibrating or self._coming):
            return
        found_inf = torch.stack([result.updates[name].found_inf for name in result.stepped])
        flags = _Flags(self._now, HostCopy.send(found_inf))
        if is_calibrating:
            self._flags.append(flags)
        if stored := self._coming:
            self._waiting.append(stored)
            stored.scale, stored.losses, stored.flags = result.scale.clone(), result.losses, flags

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
        with self._suspended(), self._restore_afterwards():
            nonfinite = self._nonfinite(step, coming)
            by_design = {tensor.name for tensor in self._nonfinite(step - 1, coming)}
        if inputs := [tensor for tensor in nonfinite if tensor.name not in by_design]:
            self._on_event(BadInputs(step=step, inputs=inputs[:INPUTS]))

    def _nonfinite(self, step: int, coming: int) -> list[BadInput]:
        """Return the nonfinite tensors of a past step's batch. The host waits."""
        position = self._position_of(step, coming)
        batches = self._batches.again(position) if position >= 0 else ()
        tensors = {
            name: BadInput(name=name[:200], inf=inf, nan=nan)
            for batch in batches
            for name, inf, nan in nonfinite_tensors("batch", batch)
        }
        return list(tensors.values())

    def _position_of(self, step: int, coming: int) -> int:
        """Return the position of a past step's examples. coming: the next step to be drawn."""
        position = self._batches.position - (coming - step) * self._batches.examples_in_a_step
        return position - sum(examples for last, examples in self._left_out if step <= last)

    def before_update(self) -> None:
        """Replay the previous step if it was skipped: its weights are still unchanged."""
        if self._waiting:
            last = self._waiting[-1].number
            self._replay_waiting(wait=last in self._requested or self._is_likely(last))
        if self._waiting:  # they are of no use once the weights have changed
            self._waiting[-1].buffers = []

    def _is_likely(self, step: int) -> bool:
        """Return whether a skip of a step is likely, as far as the host knows."""
        applied = step - 1 - (self._counts_from or 0)  # unless a skip is unknown
        has_grown = applied > 0 and applied % self._context.scaler.get_growth_interval() == 0
        return has_grown or step - self._skipped_at <= LIKELY_STEPS

    def _note_skip(self, step: int) -> None:
        self._skipped_at = max(self._skipped_at, step)
        self._counts_from = max(self._counts_from or 0, step)

    def _replay_waiting(self, *, wait: bool) -> None:
        """Replay the skipped ones of waiting steps whose flags have arrived. wait: for all flags.

        The last of them is the step before; for earlier ones the weights have moved on.
        """
        while self._waiting and (flags := self._waiting[0].flags) is not None:
            if not (wait or flags.copies.has_arrived()):
                return
            stored = self._waiting.popleft()
            self._read(stored, flags.read_skipped(), is_late=stored.number < self._attempted)

    def _read(self, stored: _Step, skipped: Tensor, *, is_late: bool) -> None:
        """Replay a step if it was skipped or requested. skipped: by optimizer."""
        requests, notes = self._requested.pop(stored.number, []), []
        if not skipped.any():
            notes.append("the step was not skipped: the weights are those after it")
        elif not skipped.all():
            notes.append("an optimizer was not skipped: its weights are those after the step")
        if is_late:
            notes.append(f"the weights and buffers are those after step {self._attempted:,}")
        if skipped.any():
            self._note_skip(stored.number)
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
        position = self._position_of(step, self._now + 1)
        if position < 0:  # before this run's data: it began from another run's checkpoint
            self._acknowledge([request])
            return
        past = _Step(step, position, None, [], None)
        past.scale = self._scales.get(step) or self._context.scaler.get_scale()
        notes = [f"the weights are those after step {self._now:,}", "dropout masks, if any, differ"]
        if step not in self._scales:
            notes.append("the scale is the current one")
        self._replay(past, notes, [request])

    def _replay(self, stored: _Step, notes: list[str], requests: list[int]) -> None:
        try:
            self._replay_and_report(stored, notes, is_requested=bool(requests))
        finally:
            self._acknowledge(
                requests
            )  # acknowledged even after an error, which is reported separately

    def _replay_and_report(self, stored: _Step, notes: list[str], *, is_requested: bool) -> None:
        recipe, networks = self._context.recipe, self._context.recipe.modules
        if any(networks[name] is not module for name, module in self._modules.items()):
            notes = [*notes, "the plain network was replayed, on this process's examples"]
        scale = float(stored.scale)  # from here on the host may wait
        with self._suspended(), self._restore_afterwards():
            recipe.modules = self._modules
            # A gradient penalty needs the scale of this step, not of the next one.
            recipe.scaler = GradScaler(
                self._device.type, init_scale=scale, enabled=recipe.scaler.is_enabled()
            )
            if stored.random is not None:
                restore_random_state(stored.random, self._device)
            if stored.state is not None:
                recipe.load_state_dict(stored.state)
            self._set_buffers(stored.buffers)
            found: list[Defect] = []
            sanitizer = Sanitizer(found.extend)
            for name, module in self._modules.items():
                names = module_names((module,))
                sanitizer.names.add({m: f"{name}.{path}" for m, path in names.items()})
                sanitizer.names.add({module: name})
            sanitizer.arm(stored.number)
            try:
                loss, gradients = self._repeat_passes(sanitizer, stored, scale)
                sanitizer.judge_gradients(list(gradients.values()))
                sanitizer.next_step(stored.number)
            finally:
                sanitizer.disarm()
            culprits = self._culprits(gradients)
        defect = next(
            (candidate for candidate in found if candidate.kind in EXPLAINING_SKIPS), None
        )
        site = defect.site if defect else Site()
        self._on_event(
            events.Replay(
                step=stored.number,
                exact=not notes,
                notes=notes,
                requested=is_requested,
                scale=scale,
                found=defect is not None,
                module=(site.module or OUTSIDE) if defect else None,
                direction=None if not defect else "backward" if site.node else "forward",
                operation=(site.node or site.operator) if defect else None,
                kind=None,
                dtype=defect.dtype if defect else None,
                largest_input=None,
                limit=defect.limit if defect else None,
                loss_nonfinite=not bool(loss.isfinite()),
                culprits=culprits,
                defect=defect and recordable(defect),
            )
        )

    def _acknowledge(self, acknowledged: list[int]) -> None:
        for request in acknowledged:
            self._on_event(RequestDone(step=self._now, request=request))

    @contextmanager
    def _restore_afterwards(self) -> Iterator[None]:
        """Restore everything that a replay changes, also after an error."""
        recipe = self._context.recipe
        networks, scaler = recipe.modules, recipe.scaler
        random, state = random_state(self._device), deepcopy(recipe.state_dict())
        buffers = [buffer.clone() for buffer in self._buffers()]
        # Between two losses a recipe may change weights, e.g. clip them.
        weights = self._weights() if len(recipe.optimizers) > 1 else []
        copies = [weight.detach().clone() for weight in weights]
        try:
            yield
        finally:
            recipe.modules, recipe.scaler = networks, scaler
            self._set_buffers(buffers)
            with torch.no_grad():
                for weight, copy in zip(weights, copies, strict=True):
                    weight.copy_(copy)
            recipe.load_state_dict(state)
            restore_random_state(random, self._device)

    def _repeat_passes(
        self, sanitizer: Sanitizer, stored: _Step, scale: float
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Repeat the step's passes without updates; return its loss and its gradients.

        Code after the last loss does not run.
        """
        gradients: dict[Tensor, Tensor] = {}
        context, total = self._context, torch.zeros((), device=self._device)
        batches, losses = self._batches.again(stored.position), stored.losses
        count = context.training.accumulation_steps
        if len(context.optimizers) == 1:
            losses = 1
        passes = context.passes(batches, lambda: context.autocast, Ranks())
        for number, (_index, yielded) in enumerate(passes, 1):
            for loss in yielded:
                mean_loss = loss.value / count
                total += mean_loss.detach()
                trained = [p for p in context.parameters(loss) if p.requires_grad]
                scaled_loss = mean_loss * scale
                seed = torch.ones_like(scaled_loss)
                sanitizer.loss(mean_loss)
                sanitizer.scale_by(scale, seed)
                sanitizer.backward_begins([scaled_loss])
                own_gradients = torch.autograd.grad(
                    *(scaled_loss, trained, seed),
                    allow_unused=True,
                    retain_graph=loss is not yielded[-1],
                )
                sanitizer.backward_ends()
                for parameter, gradient in zip(trained, own_gradients, strict=True):
                    if gradient is not None:
                        before = gradients.get(parameter)
                        gradients[parameter] = gradient if before is None else before + gradient
            if losses is not None and number == losses * count:
                break
        return total, gradients

    def _culprits(self, gradients: Mapping[Tensor, Tensor]) -> list[ReplayCulprit]:
        """Count nonfinite elements by parameter; on a GPU the host waits."""
        counted: list[ReplayCulprit] = []
        for optimizer, watched in self._context.optimizers.items():
            for name, parameter in zip(watched.names, watched.parameters, strict=True):
                gradient = gradients.get(parameter)
                inf, nan = (0, 0) if gradient is None else count_nonfinite(gradient)
                if inf or nan:
                    culprit = ReplayCulprit(optimizer=optimizer, name=name, inf=inf, nan=nan)
                    counted.append(culprit)
        return counted

    def _weights(self) -> list[Tensor]:
        return [weight for module in self._modules.values() for weight in module.parameters()]

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules.values() for buffer in module.buffers()]

    def _set_buffers(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), values, strict=False):
                buffer.copy_(value)
