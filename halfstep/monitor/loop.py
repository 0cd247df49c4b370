"""Step-by-step record of a user's training loop, from the wrapped torch functions.

With a scaler a row closes at each `GradScaler.update()`. Without one, a row is an iteration: it
closes once every known optimizer has stepped, or before a step of an optimizer that has already
stepped in it or that began the first iteration. Each optimizer has its own losses (see
backward_passes.py); nothing is averaged over optimizers. An error loses only the figure that could
not be read (see evidence/best_effort.py). Nothing here waits for the device, except for a new
optimizer in the middle of a run. This module imports torch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.evidence.best_effort import BestEffort
from halfstep.evidence.collector import Collector, skips_of
from halfstep.monitor.backward_passes import BackwardPasses
from halfstep.monitor.current_step import CurrentStep, Value, kept_loss, mean
from halfstep.monitor.diagnoses import Diagnoses, Intervals
from halfstep.monitor.first_clips import FirstClips
from halfstep.monitor.gradients import Gradients, module_names, parameter_names
from halfstep.monitor.ring import Ring
from halfstep.monitor.telemetry_rows import SCALE, SCALE_AFTER, Rows
from halfstep.monitor.usual_steps import CLOSED, MEASURED, OFF, PASSED, UPDATING, UsualSteps
from halfstep.number_formats import duration
from halfstep.telemetry.events import Event, NonfiniteGradients
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED
from halfstep.telemetry.spool import Steps

RELAY_SECONDS = 30.0  # timeout for a device to finish its rows before a new row layout
PRIVATE = ("_per_optimizer_states", "_scale", "_growth_tracker")
MOST_CONSTANTS = 8  # numbers kept on a device
STEPS_OF_OPTIMIZERS = 100  # after which every optimizer has stepped in most loops
SETTLED_AFTER = 8  # iterations after which no further optimizer is expected
NEVER = Intervals()


class Loop:
    """Listener that writes one row per step and hands rows over once they are on the host."""

    def __init__(
        self,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
        *,
        optimizers: Mapping[str, Optimizer] | None = None,
        scaler: GradScaler | None = None,
        step: int = 0,
        started_at: float | None = None,
        every: Intervals = NEVER,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a loop with no optimizers or scalers seen yet.

        optimizers, scaler: the only ones to observe; None: all.  step: the last completed one.
        started_at: origin of elapsed_ms, by halfstep.clock; default now.  every: intervals of the
        additional measurements.  say: prints a line when a figure is given up.
        """
        self.closed_steps = step
        self._on_steps, self._on_event = on_steps, on_event
        self._wanted = None if optimizers is None else {id(o): n for n, o in optimizers.items()}
        self._scaler = scaler
        self._modules: tuple[nn.Module, ...] = ()
        self._names: dict[nn.Parameter, str] = {}
        self._known: dict[int, Gradients] = {}  # by id of the optimizer, which they keep alive
        self.ignored: set[int] = set()  # ids of optimizers inside a framework's own
        #: By an optimizer's id: the row of the scaler that steps it.
        self._row_of: dict[int, CurrentStep] = {}
        self._rows = Rows({}, layers_every=every.layers)
        self._has_layers = every.layers > 0
        wants_more = every.histogram or every.headroom
        self._diagnoses = Diagnoses(every, on_event, say) if wants_more else None
        self._ring: Ring | None = None
        self._started_at = clock() if started_at is None else started_at
        self._step_started: float | None = None
        self._open: dict[int, CurrentStep] = {}  # by a scaler's id
        self._unscaled = CurrentStep()  # the row of steps without a scaler
        self._current = self._unscaled  # the row of the scaler that was called last
        self._scalers = 0  # number of scalers that have updated
        self._constants: dict[tuple[float, torch.device], Tensor] = {}
        self._loaded: WeakSet[Any] = WeakSet()  # scalers whose state was restored
        self._explicit: list[Value] = []  # losses of the open row that override the observed ones
        self._passes = BackwardPasses(lambda: self._names)
        self._best_effort = BestEffort(on_event, say, lambda: self.step)
        self._evidence = Collector(on_event, say)
        self.usual = UsualSteps(self, every.layers)
        self.stepping: list[Optimizer] = []  # optimizers inside `step`, outermost first
        self.scaler_steps = 0  # calls of GradScaler.step under way
        self._leader: int | None = None  # the optimizer that began the first iteration
        self._iterations = 0  # without a scaler, since a new optimizer was seen
        self._is_settled = optimizers is not None  # all optimizers of an iteration are known
        self._uncleared: dict[int, Tensor | None] = {}  # gradient norms by an optimizer's id
        self._before_clip: dict[int, Any] = {}  # gradients as measured before a clip
        self._first_clips = FirstClips()
        #: By row, if some optimizers had no gradients: which ones had.
        self._taking_part: dict[int, list[bool]] = {}
        self._ended: float | None = None  # end of the last step in the open row without a scaler

    @property
    def step(self) -> int:
        """The last step; without a scaler, the iteration under way once it has stepped."""
        return self.closed_steps + bool(self._unscaled.stepped)

    @step.setter
    def step(self, step: int) -> None:
        self.closed_steps = step

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that name the parameters."""
        return self._modules

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler that was called last, or the only one to observe."""
        return self._current.scaler or self._scaler

    def add(self, modules: tuple[nn.Module, ...]) -> None:
        """Name parameters as these modules do."""
        self._end_usual()
        self._modules += modules
        self._names |= parameter_names(modules)
        names = module_names(modules)
        self._evidence.add(modules, names)
        if self._diagnoses:
            self._diagnoses.add(names)
            self._diagnoses.starts(self.closed_steps + 1)

    def end(self) -> None:
        """Remove the hooks that evidence and diagnoses have installed."""
        self._evidence.origin.disarm()
        if self._diagnoses:
            self._diagnoses.end()

    def close(self) -> None:
        """Close the iteration under way, and report the remaining evidence."""
        self._end_usual()
        if self._unscaled.stepped:
            self._close_unscaled()
        if self.closed_steps >= SETTLED_AFTER:
            self._look_outside_optimizers()
        known = [
            (gradients, self._passes.has_changed(key)) for key, gradients in self._known.items()
        ]
        self._best_effort("evidence", self._evidence.end, self.closed_steps, known)

    def add_loss(self, loss: Tensor | float) -> None:
        """Set the next row's loss; several calls are averaged."""
        self._end_usual()
        self._start()
        self._explicit.append(kept_loss(loss))

    def elapsed_ms(self) -> int:
        """Return milliseconds since started_at."""
        return int((clock() - self._started_at) * 1000)

    def drain(self, patience_seconds: float) -> bool:
        """Hand over the rows that are on the device; return True if all arrived in time."""
        self._is_last = True
        has_all = self._ring is None or self._ring.drain(patience_seconds)
        self._is_last = False
        if self._diagnoses:
            self._diagnoses.report(wait=has_all)
        self._best_effort("evidence", partial(self._evidence.drain, wait=has_all))
        return has_all

    _is_last = False
    _has_looked = False  # for parameters that no optimizer has

    # ---- Listener methods, in the order of a step ---------------------------------------------

    def scaled(self, scaler: GradScaler, result: Any, outputs: Any) -> None:
        """Record the scaled losses."""
        if self.usual.stage:
            self._end_usual()
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is not None:
            self._current = row
            if "loss" not in self._best_effort.lost:
                try:
                    self._passes.scaled(result, outputs)
                except Exception as error:
                    self._best_effort.lose("loss", error)

    def repeats(self, roots: Any) -> bool:
        """Record a pass like all recent ones; return False to have it examined."""
        if self.usual.stage:
            self._end_usual()
        evidence = self._evidence
        if evidence.origin.is_armed or evidence.inputs is not None or self._step_started is None:
            return False
        try:
            return self._passes.repeats(roots)
        except Exception:  # `backward_begins` meets it too, and reports it
            return False

    def backward_begins(self, roots: Any, arguments: tuple[Any, ...], accumulates: bool) -> None:
        """Record a pass's loss, and inspect the roots that it starts from."""
        if self.usual.stage:
            self._end_usual()
        if self._step_started is None:
            self._start()
        scaler, passes, evidence = self._current.scaler, self._passes, self._evidence
        if (evidence.in_a_row > 1 or passes.suspected) and accumulates and not passes.since_step:
            self._best_effort("uncleared gradients", self._look_for_uncleared)
        count = passes.count
        scale = None if scaler is None else scaler._scale
        losses = self._best_effort("loss", passes.begins, roots, arguments, accumulates, scale)
        if accumulates and evidence.origin.is_armed:  # also inside another pass
            self._best_effort("origin", evidence.origin.arm, roots)
        if passes.count != count and evidence.is_due(passes.count, losses):
            self._best_effort(
                "evidence",
                partial(evidence.pass_begins, has_stepped=bool(self._known)),
                self.closed_steps + 1,
                passes.count,
                roots,
                losses,
            )

    def backward_ends(self) -> None:
        """Record which optimizers' gradients the pass changed."""
        if "loss" not in self._best_effort.lost:
            try:
                self._passes.ends()
            except Exception as error:
                self._best_effort.lose("loss", error)
        if self._uncleared and not self._passes.is_under_way:
            self._best_effort("uncleared gradients", self._report_uncleared)
        if self._evidence.origin.is_armed and not self._passes.is_under_way:
            self._best_effort("origin", self._evidence.origin.passed)

    def unscaled(self, scaler: GradScaler, result: Any, optimizer: Optimizer) -> None:
        """Measure unscaled gradients, before a clip can spread a NaN over them."""
        self._measure_scaled(scaler, optimizer, None)

    def checked(self, scaler: GradScaler, result: Any, optimizer: Optimizer) -> None:
        """Measure gradients that are still multiplied by the scale."""
        self._measure_scaled(scaler, optimizer, scaler._scale)

    def clipping(self, parameters: Any, max_norm: Any) -> None:
        """Measure gradients before a clip, and report a clip of still scaled gradients."""
        if self.usual.stage:
            self._end_usual()
        self._best_effort("clip", self._clip, parameters, max_norm)

    def clipped(self) -> None:
        """Recognize gradients that a clip has changed."""
        self._best_effort("loss", self._passes.clipped)
        if self._ring is None:
            self._best_effort("clip", self._first_clips.clipped)

    def clipping_values(self, gradients: Sequence[Tensor]) -> None:
        """Report a clip of the elements of still scaled gradients."""
        if self.usual.stage:
            self._end_usual()
        self._best_effort("clip", self._clip_values, gradients)

    def raised(self, scaler: GradScaler, method: str, error: Exception) -> None:
        """Record the exception with which a scaler refused a call."""
        if self.usual.stage:
            self._end_usual()
        self._best_effort(
            "refused calls",
            self._evidence.raised,
            self.closed_steps + 1,
            method,
            error,
            list(self._known.values()),
        )

    def loaded(self, scaler: GradScaler, result: Any, *_state: Any, **_states: Any) -> None:
        """Record that a scaler's state was restored."""
        if self.usual.stage:
            self._end_usual()
        self._loaded.add(scaler)

    def schedule_steps(self, scheduler: Any) -> None:
        """Record a scheduler's step, after its optimizer's last attempt."""
        self._best_effort("schedule", self._schedule, scheduler)

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Read flags and scale before `update` changes them in place."""
        if self.usual.stage:
            self._end_usual()
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        if row.number is None:
            row.number, self._scalers = self._scalers, self._scalers + 1
        scale, ring = scaler._scale, self._ring
        if ring is None or scale is None:
            return
        for optimizer, state in scaler._per_optimizer_states.items():
            if state.get("stage") is OptState.STEPPED:
                row.stepped.add(optimizer)
            if optimizer in row.measured and (flags := state["found_inf_per_device"]):
                row.found_inf[optimizer] = _joint(flags, ring.is_on_host)
        if row.found_inf:
            if ring.is_on_host or scale.is_cpu:
                row.scale = scale.item()
            else:
                row.scale = scale
                if row.stepped or row.direct or not self._is_ascent(row):
                    self._write(row, scale)

    def updated(self, scaler: GradScaler, result: Any, new_scale: Any = None) -> None:
        """Close the row; a scale set by hand shows in the next row, as "set"."""
        if self.usual.stage:
            self._end_usual()
        row, ring = self._open.get(id(scaler)), self._ring
        if row is None or not row.found_inf or ring is None or (after := scaler._scale) is None:
            return
        if not (row.stepped or row.direct) and self._is_ascent(row):
            row.ascents += 1
            row.is_continued, row.is_by_hand, row.is_special = True, False, True
            row.measured, row.found_inf = {}, {}
            return
        if ring.is_on_host or after.is_cpu:
            self._write(row, after.item() if new_scale is None else row.scale)
        elif new_scale is None:
            ring.row[SCALE_AFTER].copy_(after)
        self._close(row)
        if self._passes.plain is not None:
            self._begin_usual(row)

    def nested(self, optimizer: Optimizer) -> None:
        """Record a step inside another one; if it is already on the stack, it had raised."""
        if self.usual.stage:
            self._end_usual()
        stepping = self.stepping
        while any(outer is optimizer for outer in stepping):
            stepping.pop()
        if stepping and _shares(stepping[-1], optimizer):  # the inner step may clear gradients
            self._best_effort("gradient norms", self._measure_within, stepping[0])
        stepping.append(optimizer)

    def optimizer_ends(self, optimizer: Optimizer) -> bool:
        """Record the end of a step; return True if no scaler makes it."""
        stepping = self.stepping
        while stepping and stepping.pop() is not optimizer:
            pass
        return not (self.scaler_steps and id(optimizer) in self._row_of)

    def stepped(self, optimizer: Optimizer) -> None:
        """Record a step, unless it is part of another optimizer's, as in SAM."""
        if self.usual.stage:
            self._end_usual()
        if self._is_wanted(optimizer) and not any(
            self._is_wanted(outer) and _shares(outer, optimizer) for outer in self.stepping
        ):
            self._best_effort("steps", self._stepped, optimizer)

    # ---- Usual steps --------------------------------------------------------------------------

    def _begin_usual(self, row: CurrentStep) -> None:
        """Let `UsualSteps` record the next steps, if this row's step was a usual one."""
        ring, own = self._ring, self._passes.plain
        if ring is None or own is None or self._step_started is None or len(self._known) != 1:
            return
        [gradients] = self._known.values()
        if (
            ring.is_on_host
            and row.number == 0
            and self._row_of.get(id(gradients.optimizer)) is row
            and gradients.is_plain
            and not gradients.without_gradient
            and self._evidence.is_quiet()
            and not (self._diagnoses or self._best_effort.lost or self._unscaled.stepped)
            and not (self._before_clip or self._uncleared or self._passes.suspected)
            and not self._passes.since_step  # a pass that the next step continues from
        ):
            self.usual.begin(row, gradients, own, ring, self._step_started)

    def _end_usual(self) -> None:
        """Continue from what `UsualSteps` has recorded of the step under way."""
        usual = self.usual
        stage, usual.stage = usual.stage, OFF
        if stage == OFF:
            return
        row, passes, gradients = usual.row, self._passes, usual.gradients
        self._step_started = usual.started
        passes.count += usual.passes
        gradients.steps += usual.steps
        if stage == CLOSED:
            return
        identity = id(gradients.optimizer)
        self._current = row
        has_passed = stage >= PASSED
        passes.resumes(usual.scaled_id, usual.result, usual.loss, has_passed=has_passed)
        if stage >= MEASURED:
            row.rate = usual.rate
            row.losses[identity] = passes.take(gradients.optimizer)
            row.measured[identity] = (usual.total, usual.norms, usual.factor, None)
        if stage == UPDATING:
            row.stepped.add(identity)
            row.found_inf[identity], row.scale = 0.0, usual.before

    # ---- Steps --------------------------------------------------------------------------------

    def _measure_within(self, outer: Optimizer) -> None:
        """Measure an optimizer's gradients before an inner optimizer's step."""
        gradients = self._known.get(id(outer))
        if gradients is not None and gradients.is_current() and self._is_wanted(outer):
            self._before_clip[id(outer)] = gradients.measure()
            gradients.steps -= 1

    def _stepped(self, optimizer: Optimizer) -> None:
        """Record a step without a scaler, or one that bypasses the scaler."""
        identity = id(optimizer)
        scaled = self._row_of.get(identity)
        if scaled is not None:
            is_unscaled = identity in scaled.measured
            if is_unscaled or not self._passes.since_step:
                self._step_directly(optimizer, scaled, is_scaled=False)
                return
            if scaled is self._current and self._passes.is_scaled:
                self._step_directly(optimizer, scaled, is_scaled=True)
                return
            self._current = self._unscaled  # the scaler is no longer used
        row = self._current
        if row is not self._unscaled:
            if identity not in row.measured:
                is_scaled = self._passes.holds_scaled(identity)
                scale = row.scaler._scale if row.scaler is not None and is_scaled else None
                self._measure(row, optimizer, scale)
                row.stepped.add(identity)
                if is_scaled:
                    self._step_directly(optimizer, row, is_scaled=True)
                return
            # The scaler is used for its losses only: it never updates.
            if self._passes.is_scaled:
                self._best_effort(
                    "direct steps",
                    partial(self._evidence.direct_step, is_scaled=True),
                    self.closed_steps + 1,
                    self._known[identity].name,
                )
            self._write(row, row.scale)
            self._close(row)
            self._measure(row, optimizer)
            row.stepped.add(identity)
            return
        if self._leader is None:
            self._leader = identity
        if identity not in self._known:  # it may step in only some iterations
            self._iterations = 0
        if row.stepped and (identity in row.stepped or identity == self._leader):
            self._close_unscaled()
            self._iterations += 1
            self._is_settled |= self._iterations >= SETTLED_AFTER
        row.stepped.add(identity)
        self._measure(row, optimizer)
        self._ended = time.perf_counter()
        expected = self._known.keys() if self._wanted is None else self._wanted.keys()
        if self._is_settled and row.stepped >= expected:
            self._close_unscaled()

    def _step_directly(self, optimizer: Optimizer, row: CurrentStep, *, is_scaled: bool) -> None:
        """Record an optimizer's step without its scaler, which applies inf unchanged."""
        identity, ring = id(optimizer), self._ring
        step = self.closed_steps
        if identity in row.measured or is_scaled:
            step += 1
            if identity in self._row_of:
                row.direct.add(identity)
                row.is_special = True
            row.stepped.add(identity)
        elif ring is not None:
            ring.holds_last = True
            if ring.is_here(ring.number - 1):
                self._rows.note(ring.number - 1).is_direct = True
        name = self._known[identity].name
        self._best_effort(
            "direct steps", partial(self._evidence.direct_step, is_scaled=is_scaled), step, name
        )

    def _measure_scaled(
        self, scaler: GradScaler, optimizer: Optimizer, scale: Tensor | None
    ) -> None:
        if self.usual.stage:
            self._end_usual()
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        identity = id(optimizer)
        before = self._row_of.get(identity)
        if before is not row:
            if not self._is_wanted(optimizer):
                return
            self._row_of[identity] = row
            if before is not None and row.number is None and not before.measured:
                self._replace(before, row)
        if identity not in row.measured:  # otherwise it was measured before a clip
            is_unscaled = self._passes.has_unscaled(identity)
            self._measure(row, optimizer, scale)
            if is_unscaled and identity in self._known:
                self._best_effort(
                    "unscaled losses",
                    self._evidence.unscaled_loss,
                    self.closed_steps + 1,
                    self._known[identity].name,
                )

    def _is_ascent(self, row: CurrentStep) -> bool:
        """Return True if the scaler was updated within a step, as by SAM's first half.

        The loop moved the weights by hand, and the optimizer's step follows.
        """
        row.is_by_hand = all(map(self._passes.has_moved, row.measured))
        return row.is_by_hand and not row.ascents

    def _replace(self, before: CurrentStep, row: CurrentStep) -> None:
        """Continue a scaler's rows with the scaler that replaced it for an optimizer."""
        row.number = before.number
        if before.scaler is not None and before not in self._row_of.values():
            self._open.pop(id(before.scaler), None)
        row.has_replaced = row.is_special = row.scaler not in self._loaded

    def _look_for_uncleared(self) -> None:
        """Measure gradients not cleared since the last step, before a pass adds to them."""
        suspected, self._passes.suspected = self._passes.suspected, set()
        for identity in self._passes.uncleared():
            is_skipped = self._evidence.in_a_row > 1 and identity in self._row_of
            is_due = is_skipped or identity in suspected
            if is_due and (gradients := self._known.get(identity)):
                self._uncleared[identity] = gradients.norms_now()

    def _report_uncleared(self) -> None:
        """Report uncleared gradients to which the pass has added."""
        for identity, norms in self._uncleared.items():
            if norms is not None and identity in self._passes.changed:
                name = self._known[identity].name
                carried = self._passes.carried(identity)
                self._evidence.uncleared(self.step + 1, name, norms, carried)
        self._uncleared.clear()

    def _clip(self, parameters: Any, max_norm: Any) -> None:
        norms: list[Value] = []  # of optimizers without a scaler
        clipped = {id(parameters)} if isinstance(parameters, Tensor) else set(map(id, parameters))
        for identity, gradients in self._known.items():
            first = next(iter(gradients.parameters), None)
            if id(first) not in clipped or not gradients.is_current():
                continue
            row = self._row_of.get(identity)
            if row is None or row is not self._current or row.scaler is None:
                if self._current is self._unscaled:
                    measured = self._before_clip[identity] = gradients.measure()
                    gradients.steps -= 1
                    norms += [] if measured is None else [measured[0]]
                continue
            if self._is_clip_early(row.scaler, identity):
                self._measure(row, gradients.optimizer, row.scaler._scale)
                self._evidence.scaled_clip(self.closed_steps + 1, gradients.name, max_norm)
        if norms:
            steps = self.closed_steps + bool(self._unscaled.stepped)
            self._evidence.clipped(steps, sum(norms), self._passes.latest_loss)
        if self._ring is None:  # no optimizer is known yet
            several = [parameters] if isinstance(parameters, Tensor) else parameters
            scaler = self._current.scaler if self._passes.is_scaled else None
            scale = scaler._scale if scaler is not None else None
            self._first_clips.measure(several, max_norm, scale)

    def _clip_values(self, clipped: Sequence[Tensor]) -> None:
        identities = set(map(id, clipped))
        for identity, gradients in self._known.items():
            first = next((p.grad for p in gradients.parameters if p.grad is not None), None)
            row = self._row_of.get(identity)
            if row is None or row is not self._current or row.scaler is None:
                continue
            if id(first) in identities and self._is_clip_early(row.scaler, identity):
                self._evidence.scaled_clip(self.closed_steps + 1, gradients.name, None)

    def _is_clip_early(self, scaler: GradScaler, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are still scaled. optimizer: its id."""
        states = scaler._per_optimizer_states
        stage = states[optimizer].get("stage") if optimizer in states else None
        return getattr(stage, "name", "READY") == "READY" and self._passes.is_scaled

    def _schedule(self, scheduler: Any) -> None:
        optimizer = scheduler.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # as Accelerate wraps it
        gradients, ring = self._known.get(id(optimizer)), self._ring
        if gradients is not None and ring is not None and id(optimizer) in self._row_of:
            is_open = (
                id(optimizer) in self._row_of[id(optimizer)].measured
                or self.usual.stage >= MEASURED
            )
            number = ring.number - (not is_open)
            name = type(scheduler).__name__
            self._evidence.schedule.stepped(number, gradients.name, name)

    # ---- Rows ---------------------------------------------------------------------------------

    def _measure(self, row: CurrentStep, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        identity = id(optimizer)
        gradients = self._known.get(identity)
        if gradients is None or not gradients.is_current():
            gradients = self._meet(optimizer)
            row.measured.pop(identity, None)  # its parameters are no longer the same
        if row.rate is None:
            rate = gradients.rate()  # a schedule may change a tensor in place
            row.rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        losses = self._best_effort("loss", self._passes.take, optimizer)
        row.losses.setdefault(identity, losses or [])  # an ascent's loss is the step's
        measured = self._before_clip.pop(identity, None) if self._before_clip else None
        if measured is None:
            before = self._first_clips.take(gradients.parameters)
            if before and (scale := before[0].scale) is not None:
                step = self.closed_steps + 1
                self._evidence.scaled_clip(step, gradients.name, before[0].max_norm)
            measured = self._best_effort(gradients.figure, gradients.measure, scale, before)
        else:
            gradients.steps += 1
        step = self.closed_steps + 1
        if measured is not None:
            row.measured[identity] = measured
            if self._diagnoses:
                self._diagnoses.measured(step, row, gradients, scale)
        if gradients.without_gradient:
            self._best_effort(
                "missing gradients",
                partial(self._evidence.measured, has_changed=self._passes.has_changed(identity)),
                step,
                gradients,
            )

    def _start(self) -> None:
        if self._step_started is None:
            self._step_started = time.perf_counter()

    def _meet(self, optimizer: Optimizer) -> Gradients:
        """Register a new or changed optimizer, and allocate its rows."""
        self._start()
        known = self._known.get(id(optimizer))
        name = self._name(optimizer) if known is None else known.name
        if known is not None:  # a parameter was replaced
            self._names |= parameter_names(self._modules)
        gradients = Gradients(optimizer, name, self._names)
        if self._ring is not None and not self._ring.drain(RELAY_SECONDS):
            raise RuntimeError(
                f"the device has not finished its steps in {duration(RELAY_SECONDS)}"
            )
        self._passes.forget(id(optimizer)) if known is not None else None
        self._known[id(optimizer)] = gradients
        self._best_effort("optimizers", self._evidence.meets, self.closed_steps + 1, gradients)
        has_rates = isinstance(gradients.rate(), Tensor)
        names = {gradients.name: gradients.names for gradients in self._known.values()}
        self._rows = self._rows.relaid(
            names, has_rates=has_rates, has_own_losses=len(self._known) > 1
        )
        self._evidence.schedule.forget_rows()
        self._taking_part.clear()
        self._ring = Ring(
            self._rows.columns,
            self._rows.scalars,
            gradients.device,
            self._started_at,
            self._hand_over,
        )
        return gradients

    def _name(self, optimizer: Optimizer) -> str:
        if self._wanted is not None:
            return self._wanted[id(optimizer)]
        name = type(optimizer).__name__
        others = [type(known.optimizer).__name__ for known in self._known.values()]
        return f"{name}{others.count(name) + 1}" if name in others else name

    def _write(self, row: CurrentStep, scale_after: Value) -> None:
        """Write a row: as numbers on a CPU, else with two kernels on the device."""
        ring = self._ring
        if ring is None:
            return
        found_inf: list[Value] = []
        totals: list[Value] = []
        for identity, gradients in self._known.items():
            found_inf.append(row.found_inf.get(identity, 0.0))
            if measured := row.measured.get(identity):
                total, _norms, _factor, counts = measured
                totals.append(total)
                if counts:
                    self._rows.count(ring.number, gradients.name, counts)
            else:
                totals.append(0.0)
        losses = self._explicit or next(filter(None, row.losses.values()), [])
        loss = losses[0] if len(losses) == 1 else mean(losses)
        row.loss = loss
        if (
            not losses
            or len(row.losses) > 1
            or row.is_special
            or not row.stepped >= row.found_inf.keys()
        ):
            self._note(ring.number, row, has_loss=bool(losses))
        rate = row.rate
        if rate is None or isinstance(rate, float):
            rate = 0.0  # the host has it
        elif ring.is_on_host:
            rate = rate.item()
        own = self._own_losses(row) if len(self._known) > 1 else ()
        values = [loss, row.scale, scale_after, rate, *found_inf, *totals, *totals, *own]
        if not ring.is_on_host:
            self._queue(ring.row, row, values)
            return
        ring.values = values  # the ring waits for values on another device
        if self._has_layers and self._rows.is_for_layers(self.step + 1):
            self._rows.hold(ring.number, self._norms(row))

    def _own_losses(self, row: CurrentStep) -> list[Value]:
        return [mean(row.losses.get(identity) or []) for identity in self._known]

    def _note(self, number: int, row: CurrentStep, *, has_loss: bool) -> None:
        """Note the facts about a row that only the host has."""
        row.is_special = False
        if not has_loss:
            self._rows.note(number).has_loss = False
        if row.is_continued:
            self._rows.note(number).is_continued = True
            row.is_continued = False
        if row.has_replaced:
            self._rows.note(number).replaced = True
            row.has_replaced = False
        if row.direct:
            self._rows.note(number).is_direct = True
        elif row.found_inf and not row.is_by_hand and not row.stepped >= row.found_inf.keys():
            self._rows.note(number).is_stepped = bool(row.stepped)
            self._best_effort("steps left out", self._evidence.not_stepped, self.closed_steps + 1)
        if len(row.losses) > 1 and not _are_one(list(row.losses.values())):
            known = list(self._known)
            own = [known.index(identity) for identity, losses in row.losses.items() if losses]
            self._rows.note(number).own_losses = own

    def _norms(self, row: CurrentStep) -> list[float]:
        norms: list[float] = []
        for identity, gradients in self._known.items():
            measured = row.measured.get(identity)
            if measured is None or isinstance(measured[1], Tensor):
                norms += [0.0] * len(gradients.names)
            else:
                _total, own, factor, _counts = measured
                norms += [norm / factor for norm in own]
        return norms

    def _queue(self, target: Tensor, row: CurrentStep, values: list[Value]) -> None:
        """Queue the device's write of a row: scalars, then norms of parameters."""
        norms = [
            row.measured[identity][1] if identity in row.measured else gradients.no_norms
            for identity, gradients in self._known.items()
        ]
        device = target.device
        scalars = torch.stack(
            [
                self._constant(value, device)
                if isinstance(value, float)
                else _tensor(value, device)
                for value in values
            ]
        )
        torch.cat([scalars, *(_tensor(norm, device) for norm in norms)], out=target)

    def _constant(self, value: float, device: torch.device) -> Tensor:
        """Return a number on a device; those that most rows hold are made once."""
        key = (value, device)
        if key not in self._constants:
            if len(self._constants) == MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.full((), value, device=device)
        return self._constants[key]

    def _close_unscaled(self) -> None:
        self._write(self._unscaled, 1.0)
        self._close(self._unscaled, self._ended)

    def _close(self, row: CurrentStep, ended: float | None = None) -> None:
        """Close the row, and start the next step's time. ended: None for now."""
        ring = self._ring
        if ring is None or self._step_started is None:
            return
        self.closed_steps += 1
        self._first_clips.forget()
        step = self.closed_steps
        if len(row.measured) < len(self._known):
            self._taking_part[ring.number] = [known in row.measured for known in self._known]
        if row.number:
            self._rows.belongs(ring.number, row.number)
        if self._diagnoses:
            scale = row.scale if ring.is_on_host else ring.row[SCALE]
            self._diagnoses.closed(step, row, scale)
        if row.scaler is not None and not self._evidence.is_uneventful(row):
            scale = row.scale if ring.is_on_host else ring.row[SCALE]
            self._best_effort(
                "origin", self._evidence.closed, step, row, self._known, scale, row.loss
            )
        self._passes.is_over = True
        rate = row.rate if isinstance(row.rate, float) else 0.0
        if row.stepped:
            row.ascents = 0
        row.clear()
        if self._explicit:
            self._explicit = []
        self._step_started = ring.close(step, self._step_started, rate, ended=ended)

    def _look_outside_optimizers(self) -> None:
        self._has_looked = True
        if self._wanted is None:
            self._best_effort(
                "parameters without an optimizer",
                self._evidence.outside_optimizers,
                self.closed_steps,
                self._names,
                list(self._known.values()),
            )

    def _hand_over(self, first: int, rows: NDArray[np.float32], records: Steps) -> None:
        if self.closed_steps >= STEPS_OF_OPTIMIZERS and not self._has_looked:
            self._look_outside_optimizers()
        events = self._rows.read(first, rows, records)
        self._on_steps(records)
        if self._ring is not None and (records["flags"] & (SKIPPED | NONFINITE_LOSS)).any():
            self._ring.hurry()
        for event in events:
            if not isinstance(event, NonfiniteGradients):
                self._on_event(event)
        self._best_effort("evidence", self._read_evidence, first, rows, records, events)
        if self._diagnoses:
            self._diagnoses.report()

    def _read_evidence(
        self, first: int, rows: NDArray[np.float32], records: Steps, events: list[Event]
    ) -> None:
        ring, names = self._ring, [gradients.name for gradients in self._known.values()]
        examined = range(first, first + len(records))
        if not self._taking_part and not (records["flags"] & SKIPPED).any():
            # Usually; the newest row is examined, because a schedule may still step after it.
            self._evidence.schedule.applied(examined[:-1], len(names))
            examined = examined[-1:]
        taking_part = [self._taking_part.pop(number, None) for number in examined]
        latest = records[len(records) - len(examined) :]
        skips = skips_of(latest, names, taking_part)
        self._evidence.arrived(
            list(zip(examined, latest["step"].tolist(), skips, strict=True)),
            records,
            events,
            None if ring is None or ring.is_on_host else rows[:, self._rows.scalars :],
            is_scaled=bool(self._row_of),
            may_see_rates=len(names) == 1 and self._scalers == 1,
            is_last=self._is_last,
        )

    def _meet_scaler(self, scaler: GradScaler) -> CurrentStep | None:
        """Return a new row for a new scaler, or None if it is not to be observed."""
        if not scaler._enabled or self._scaler not in (None, scaler):
            return None
        _check_attributes(scaler)
        self._start()
        row = self._open[id(scaler)] = CurrentStep(scaler)
        if self._unscaled.stepped:
            self._close_unscaled()
        return row

    def _is_wanted(self, optimizer: Optimizer) -> bool:
        identity = id(optimizer)
        return (self._wanted is None or identity in self._wanted) and identity not in self.ignored


def _check_attributes(scaler: GradScaler) -> None:
    """Raise AttributeError if this torch's scaler lacks an attribute that we read."""
    if missing := [name for name in PRIVATE if not hasattr(scaler, name)]:
        raise AttributeError(
            f"torch {torch.__version__}'s {type(scaler).__name__} has no {', '.join(missing)}, "
            "from which skips and scale are read; for supported versions see docs/how-to/watch.md"
        )


def _joint(flags: Mapping[torch.device, Tensor], is_read: bool) -> Value:
    """Return the sum of several devices' flags: a number, or a tensor on the first device.

    is_read: return a number, and wait for the device if necessary.
    """
    first, *others = flags.values()
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    return first.item() if is_read or (first.is_cpu and not others) else first.reshape(())


def _tensor(value: Value | list[float], device: torch.device) -> Tensor:
    """Return a value as an fp32 tensor on this device, without waiting."""
    return torch.as_tensor(value).to(device, torch.float32, non_blocking=True)


def _shares(outer: Optimizer, inner: Optimizer) -> bool:
    """Return True if two optimizers share a parameter."""
    own = {id(p) for group in outer.param_groups for p in group["params"]}
    return any(id(p) in own for group in inner.param_groups for p in group["params"])


def _are_one(losses: list[list[Value]]) -> bool:
    """Return True if all optimizers have the losses of the same backward passes."""
    first = losses[0]
    return all(
        len(other) == len(first) and all(a is b for a, b in zip(other, first, strict=True))
        for other in losses[1:]
    )
