"""Step-by-step record of a user's training loop, from the wrapped torch functions.

With a scaler a row closes at each `GradScaler.update()`. Without one, a row is an iteration: it
closes once every known optimizer has stepped, or before a step of an optimizer that has already
stepped in it or that began the first iteration. Each optimizer has its own losses (see
backward_passes.py); nothing is averaged over optimizers. An error loses only the figure that could
not be read (see evidence/best_effort.py). Nothing here waits for the device, except for a new
optimizer in the middle of a run. This module imports torch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.evidence.best_effort import BestEffort
from halfstep.evidence.collector import Collector, skips_of
from halfstep.number_formats import duration
from halfstep.recording.gradients import (
    Gradients,
    Measured,
    module_names,
    parameter_names,
    value_on_host,
)
from halfstep.recording.reader import Counts, Reader, ScalerRule
from halfstep.recording.recorder import Recorder
from halfstep.recording.ring import RING_ROWS
from halfstep.recording.row import LOSS, SCALE, Layout, Rows
from halfstep.telemetry.events import Event, NonfiniteGradients
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.backward_passes import BackwardPasses
from halfstep.watching.current_step import CurrentStep, Value
from halfstep.watching.diagnoses import Diagnoses, Intervals
from halfstep.watching.first_clips import FirstClips

RELAY_SECONDS = 30.0  # timeout for a device to finish its rows before a new row layout
STEPPED = OptState.STEPPED
PRIVATE = ("_per_optimizer_states", "_scale", "_growth_tracker")
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
        self.rows: dict[int, CurrentStep] = {}
        self._reader = Reader(Layout({}), layers_every=every.layers)
        wants_more = every.histogram or every.headroom
        self._diagnoses = Diagnoses(every, on_event, say) if wants_more else None
        self._recorder: Recorder | None = None
        self._one = torch.ones((), device="cpu")
        self._started_at = clock() if started_at is None else started_at
        self._step_started: float | None = None
        self._open: dict[int, CurrentStep] = {}  # by a scaler's id
        self._unscaled = CurrentStep()  # the row of steps without a scaler
        self._current = self._unscaled  # the row of the scaler that was called last
        self._scalers = 0  # number of scalers that have updated
        self._loaded: WeakSet[Any] = WeakSet()  # scalers whose state was restored
        self._explicit: list[Value] = []  # losses of the open row that override the observed ones
        self._closed_row = self._unscaled  # the row that was closed last
        self.passes = BackwardPasses(lambda: self._names)
        self._best_effort = BestEffort(on_event, say, lambda: self.step)
        self.evidence = Collector(on_event, say)
        #: Handle the end of `unscale_`, before a clip can spread a NaN, or of an inf check that has
        #: left gradients multiplied by the scale. (A partial is no further call in each step.)
        self.unscaled = partial(self._measure_scaled, True)
        self.checked = partial(self._measure_scaled, False)
        self.stepping: list[Optimizer] = []  # optimizers inside `step`, outermost first
        self.scaler_steps = 0  # calls of GradScaler.step under way
        self._leader: int | None = None  # the optimizer that began the first iteration
        self._iterations = 0  # without a scaler, since a new optimizer was seen
        self._is_settled = optimizers is not None  # all optimizers of an iteration are known
        self._uncleared: dict[int, Tensor | None] = {}  # gradient norms by an optimizer's id
        self._before_clip: dict[int, Measured] = {}  # gradients as measured before a clip
        self._clipping: set[int] = set()  # optimizers whose last unscaled step was then clipped
        #: Norms that a clip is about to use, of the gradients that it was given.
        self.norms_of_clip: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
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
        self._modules += modules
        self._names |= parameter_names(modules)
        names = module_names(modules)
        self.evidence.add(modules, names)
        if self._diagnoses:
            self._diagnoses.add(names)
            self._diagnoses.starts(self.closed_steps + 1)

    def end(self) -> None:
        """Remove the hooks that evidence and diagnoses have installed."""
        self.evidence.origin.disarm()
        if self._diagnoses:
            self._diagnoses.end()

    def close(self) -> None:
        """Close the iteration under way, and report the remaining evidence."""
        if self._unscaled.stepped:
            self._close_unscaled()
        if self.closed_steps >= SETTLED_AFTER:
            self._look_outside_optimizers()
        known = [
            (gradients, self.passes.has_changed(key)) for key, gradients in self._known.items()
        ]
        self._best_effort("evidence", self.evidence.end, self.closed_steps, known)

    def add_loss(self, loss: Tensor | float) -> None:
        """Set the next row's loss; several calls are averaged."""
        self._start()
        if isinstance(loss, Tensor):
            loss = loss.detach().float()
            loss = loss.mean() if loss.ndim else loss.clone()
        self._explicit.append(loss)

    def elapsed_ms(self) -> int:
        """Return milliseconds since started_at."""
        return int((clock() - self._started_at) * 1000)

    def drain(self, patience_seconds: float) -> bool:
        """Hand over the rows that are on the device; return True if all arrived in time."""
        self._is_last = True
        has_all = self._drain_rows(patience_seconds)
        self._is_last = False
        if self._diagnoses:
            self._diagnoses.report(wait=has_all)
        self._best_effort("evidence", partial(self.evidence.drain, wait=has_all))
        return has_all

    has_pending = False  # unscaled gradients wait for their clip
    _is_last = False
    _has_looked = False  # for parameters that no optimizer has

    # ---- Listener methods, in the order of a step ---------------------------------------------

    def scaled(self, scaler: GradScaler, result: Any, outputs: Any) -> None:
        """Record the scaled losses."""
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is not None:
            self._current = row
            if "loss" not in self._best_effort.lost:
                try:
                    self.passes.scaled(result, outputs)
                except Exception as error:
                    self._best_effort.lose("loss", error)

    def backward_begins(self, roots: Any, arguments: tuple[Any, ...], accumulates: bool) -> None:
        """Record a pass's loss, and inspect the roots that it starts from."""
        if self._step_started is None:
            self._start()
        scaler, passes, evidence = self._current.scaler, self.passes, self.evidence
        if (evidence.in_a_row > 1 or passes.suspected) and accumulates and not passes.since_step:
            self._best_effort("uncleared gradients", self._look_for_uncleared)
        count = passes.count
        scale = None if scaler is None else scaler._scale
        losses = self._best_effort("loss", passes.begins, roots, arguments, accumulates, scale)
        numbers = None if losses is None else [_number(loss) for loss in losses]
        if accumulates and evidence.origin.is_armed:  # also inside another pass
            self._best_effort("origin", evidence.origin.arm, roots)
        if passes.count != count and evidence.is_due(passes.count, numbers):
            self._best_effort(
                "evidence",
                partial(evidence.pass_begins, has_stepped=bool(self._known)),
                self.closed_steps + 1,
                passes.count,
                roots,
                numbers,
            )

    def backward_ends(self) -> None:
        """Record which optimizers' gradients the pass changed."""
        if "loss" not in self._best_effort.lost:
            try:
                self.passes.ends()
            except Exception as error:
                self._best_effort.lose("loss", error)
        if self._uncleared and not self.passes.is_under_way:
            self._best_effort("uncleared gradients", self._report_uncleared)
        if self.evidence.origin.is_armed and not self.passes.is_under_way:
            self._best_effort("origin", self.evidence.origin.passed)

    def clipping(self, parameters: Any, max_norm: Any, total_norm: Any) -> None:
        """Measure gradients before a clip, and report a clip of still scaled gradients."""
        clip, self.norms_of_clip = self.norms_of_clip, None
        if "clip" in self._best_effort.lost:
            return
        try:
            several = [parameters] if isinstance(parameters, Tensor) else parameters
            norms = None if clip is None else clip[1]
            if self._recorder is None:  # no optimizer is known yet
                scaler = self._current.scaler if self.passes.is_scaled else None
                scale = None if scaler is None else scaler._scale
                self._first_clips.measure(several, max_norm, scale, norms)
                return
            ids = list(map(id, several))
            for identity, gradients in self._known.items():
                is_plain = norms is not None and len(norms) == len(ids) and gradients.is_in_order
                if is_plain and gradients.clipped == ids:
                    of_clip = norms
                else:
                    of_clip = None if norms is None else gradients.norms_of_clip(several, norms)
                row = self.rows.get(identity)
                if row is not None and identity in row.pending and of_clip is not None:
                    row.pending.discard(identity)
                    self.has_pending = bool(row.pending)
                    self._measure(row, gradients.optimizer, None, of_clip)
                elif of_clip is not None or gradients.is_among(several):
                    self._measure_clipped(gradients, row, max_norm, total_norm, of_clip)
        except Exception as error:
            self._best_effort.lose("clip", error)

    def clipped(self) -> None:
        """Recognize gradients that a clip has changed."""
        self._best_effort("loss", self.passes.clipped)
        if self._recorder is None:
            self._best_effort("clip", self._first_clips.clipped)

    def clipping_values(self, gradients: Sequence[Tensor]) -> None:
        """Report a clip of the elements of still scaled gradients."""
        self._best_effort("clip", self._clip_values, gradients)

    def raised(self, scaler: GradScaler, method: str, error: Exception) -> None:
        """Record the exception with which a scaler refused a call."""
        self._best_effort(
            "refused calls",
            self.evidence.raised,
            self.closed_steps + 1,
            method,
            error,
            list(self._known.values()),
        )

    def loaded(self, scaler: GradScaler, result: Any, *_state: Any, **_states: Any) -> None:
        """Record that a scaler's state was restored."""
        self._loaded.add(scaler)
        self._reader.applied = None

    def measure_pending(self) -> None:
        """Measure gradients whose clip did not come."""
        self.has_pending = False
        for row in self._open.values():
            if row.pending:
                self._measure_pending(row)

    def schedule_steps(self, scheduler: Any) -> None:
        """Record a scheduler's step, after its optimizer's last attempt."""
        self._best_effort("schedule", self._schedule, scheduler)

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Read flags and scale before `update` changes them in place."""
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        if row.number is None:
            row.number, self._scalers = self._scalers, self._scalers + 1
        scale, recorder = scaler._scale, self._recorder
        if scale is None:
            return
        if row.pending:
            self._measure_pending(row)
        if recorder is None:
            return
        for optimizer, state in scaler._per_optimizer_states.items():
            if state.get("stage") is STEPPED:
                row.stepped.add(optimizer)
            if optimizer in row.measured and (flags := state["found_inf_per_device"]):
                [flag] = flags.values() if len(flags) == 1 else (_joint(flags),)
                row.found_inf[optimizer] = flag if not flag.ndim else flag.reshape(())
        if row.found_inf:
            if row.stepped or row.direct or not self._is_ascent(row):
                is_set = new_scale is not None or row.number
                self._write(row, scale, scale if is_set else None)
                return
        elif new_scale is None:
            return
        if row is self._closed_row:  # this update is no step's
            recorder.set_scale_after(scale)

    def updated(self, scaler: GradScaler, result: Any, new_scale: Any = None) -> None:
        """Close the row; a scale set by hand shows in the next row, as "set"."""
        row, recorder = self._open.get(id(scaler)), self._recorder
        if row is None or recorder is None or (after := scaler._scale) is None:
            return
        if not row.found_inf:
            if row is self._closed_row and recorder.knows_scale_after:
                row.version = id(after), after._version
            return
        is_torchs = isinstance(scaler, GradScaler)
        row.version = (id(after), after._version) if is_torchs else None
        if not (row.stepped or row.direct) and self._is_ascent(row):
            row.ascents += 1
            row.is_continued, row.is_by_hand, row.is_special = True, False, True
            row.measured.clear()
            row.found_inf.clear()
            return
        if (row.number or not is_torchs) and new_scale is None:
            recorder.set_open_scale_after(after)
        self._close(row, after)

    def nested(self, optimizer: Optimizer) -> None:
        """Record a step inside another one; if it is already on the stack, it had raised."""
        stepping = self.stepping
        while any(outer is optimizer for outer in stepping):
            stepping.pop()
        if stepping and _shares(stepping[-1], optimizer):  # the inner step may clear gradients
            self._best_effort("gradient norms", self._measure_within, stepping[0])
        stepping.append(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """Record a step, unless it is part of another optimizer's, as in SAM."""
        is_any = self._wanted is None and not self.ignored
        if not (is_any or self._is_wanted(optimizer)) or (
            self.stepping
            and any(self._is_wanted(o) and _shares(o, optimizer) for o in self.stepping)
        ):
            return
        if "steps" not in self._best_effort.lost:
            try:
                self._stepped(optimizer)
            except Exception as error:
                self._best_effort.lose("steps", error)

    # ---- Steps --------------------------------------------------------------------------------

    def _measure_within(self, outer: Optimizer) -> None:
        """Measure an optimizer's gradients before an inner optimizer's step."""
        gradients = self._known.get(id(outer))
        if gradients is not None and gradients.is_current() and self._is_wanted(outer):
            norms = gradients.norms()
            if norms is not None:
                self._before_clip[id(outer)] = norms, self._one, None

    def _stepped(self, optimizer: Optimizer) -> None:
        """Record a step without a scaler, or one that bypasses the scaler."""
        identity = id(optimizer)
        scaled = self.rows.get(identity)
        if scaled is not None:
            is_unscaled = identity in scaled.measured
            if is_unscaled or not self.passes.since_step:
                self._step_directly(optimizer, scaled, is_scaled=False)
                return
            if scaled is self._current and self.passes.is_scaled:
                self._step_directly(optimizer, scaled, is_scaled=True)
                return
            self._current = self._unscaled  # the scaler is no longer used
        row = self._current
        if row is not self._unscaled:
            if identity not in row.measured:
                is_scaled = self.passes.holds_scaled(identity)
                scale = row.scaler._scale if row.scaler is not None and is_scaled else None
                self._measure(row, optimizer, scale)
                row.stepped.add(identity)
                if is_scaled:
                    self._step_directly(optimizer, row, is_scaled=True)
                return
            # The scaler is used for its losses only: it never updates.
            if self.passes.is_scaled:
                self._best_effort(
                    "direct steps",
                    partial(self.evidence.direct_step, is_scaled=True),
                    self.closed_steps + 1,
                    self._known[identity].name,
                )
            scale = self._scale_of(row)
            self._write(row, scale, scale)
            self._close(row, scale)
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
        identity, recorder = id(optimizer), self._recorder
        step = self.closed_steps
        if identity in row.measured or is_scaled:
            step += 1
            if identity in self.rows:
                row.direct.add(identity)
                row.is_special = True
            row.stepped.add(identity)
        elif recorder is not None:
            ring = recorder.ring
            ring.holds_last = True
            if ring.is_here(ring.number - 1):
                self._reader.note(ring.number - 1).is_direct = True
        name = self._known[identity].name
        self._best_effort(
            "direct steps", partial(self.evidence.direct_step, is_scaled=is_scaled), step, name
        )

    def _measure_scaled(
        self, is_unscaled: bool, scaler: GradScaler, _result: Any, optimizer: Optimizer
    ) -> None:
        row = self._open.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        identity = id(optimizer)
        before = self.rows.get(identity)
        if before is not row:
            if not self._is_wanted(optimizer):
                return
            self.rows[identity] = row
            if before is not None and row.number is None and not before.measured:
                self._replace(before, row)
        if identity in row.measured:  # before a clip
            return
        if is_unscaled and identity in self._clipping and identity in self._known:
            row.pending.add(identity)
            self.has_pending = True
            return
        has_unscaled = self.passes.plain is None and self.passes.has_unscaled(identity)
        self._measure(row, optimizer, None if is_unscaled else scaler._scale)
        if has_unscaled and identity in self._known:
            self._best_effort(
                "unscaled losses",
                self.evidence.unscaled_loss,
                self.closed_steps + 1,
                self._known[identity].name,
            )

    def _measure_pending(self, row: CurrentStep) -> None:
        """Measure unscaled gradients that were not clipped as those of the step before."""
        for identity in tuple(row.pending):
            row.pending.discard(identity)
            self._clipping.discard(identity)
            self._measure(row, self._known[identity].optimizer)

    def _is_ascent(self, row: CurrentStep) -> bool:
        """Return True if the scaler was updated within a step, as by SAM's first half.

        The loop moved the weights by hand, and the optimizer's step follows.
        """
        row.is_by_hand = all(map(self.passes.has_moved, row.measured))
        return row.is_by_hand and not row.ascents

    def _replace(self, before: CurrentStep, row: CurrentStep) -> None:
        """Continue a scaler's rows with the scaler that replaced it for an optimizer."""
        row.number = before.number
        if before.scaler is not None and before not in self.rows.values():
            self._open.pop(id(before.scaler), None)
        row.has_replaced = row.is_special = row.scaler not in self._loaded

    def _look_for_uncleared(self) -> None:
        """Measure gradients not cleared since the last step, before a pass adds to them."""
        suspected, self.passes.suspected = self.passes.suspected, set()
        for identity in self.passes.uncleared():
            is_skipped = self.evidence.in_a_row > 1 and identity in self.rows
            is_due = is_skipped or identity in suspected
            if is_due and (gradients := self._known.get(identity)):
                self._uncleared[identity] = gradients.norms_now()

    def _report_uncleared(self) -> None:
        """Report uncleared gradients to which the pass has added."""
        for identity, norms in self._uncleared.items():
            if norms is not None and identity in self.passes.changed:
                name = self._known[identity].name
                carried = self.passes.carried(identity)
                self.evidence.uncleared(self.step + 1, name, norms, carried)
        self._uncleared.clear()

    def _measure_clipped(
        self,
        gradients: Gradients,
        row: CurrentStep | None,
        max_norm: Any,
        total_norm: Any,
        norms: Sequence[Tensor] | None,
    ) -> None:
        """Measure gradients that are about to be clipped, and were not known to be.

        row: of their scaler, if any.  norms: theirs, if the clip has computed them.
        """
        optimizer = gradients.optimizer
        identity, groups = id(optimizer), optimizer.param_groups
        is_same = len(groups) == 1 and list(map(id, groups[0]["params"])) == gradients.ids
        if not (is_same or gradients.is_current()):
            return
        if row is not None and identity in row.pending:  # the clip has other norms
            self._measure_pending(row)
        elif row is None or row is not self._current or row.scaler is None:
            if self._current is self._unscaled:
                norm = _number(total_norm) if isinstance(total_norm, Tensor) else math.nan
                if bare := norms or gradients.norms():
                    is_finite = isinstance(norm, Tensor) or math.isfinite(norm)
                    counts = None if is_finite else gradients.nonfinite(bare)
                    self._before_clip[identity] = bare, self._one, counts
                if self.evidence.is_for_clip(norm):
                    loss = self.passes.latest_loss
                    number = math.nan if loss is None else _number(loss)
                    self.evidence.clipped(self.step, norm, number)
        elif self._is_clip_early(row.scaler, identity):
            self._measure(row, optimizer, row.scaler._scale, norms)
            self.evidence.scaled_clip(self.closed_steps + 1, gradients.name, max_norm)
        elif norms is not None:
            self._clipping.add(identity)  # from the next step on

    def _clip_values(self, clipped: Sequence[Tensor]) -> None:
        identities = set(map(id, clipped))
        for identity, gradients in self._known.items():
            first = next((p.grad for p in gradients.parameters if p.grad is not None), None)
            row = self.rows.get(identity)
            if row is None or row is not self._current or row.scaler is None:
                continue
            if id(first) in identities and self._is_clip_early(row.scaler, identity):
                self.evidence.scaled_clip(self.closed_steps + 1, gradients.name, None)

    def _is_clip_early(self, scaler: GradScaler, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are still scaled. optimizer: its id."""
        states = scaler._per_optimizer_states
        stage = states[optimizer].get("stage") if optimizer in states else None
        return getattr(stage, "name", "READY") == "READY" and self.passes.is_scaled

    def _schedule(self, scheduler: Any) -> None:
        optimizer = scheduler.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # as Accelerate wraps it
        gradients, recorder = self._known.get(id(optimizer)), self._recorder
        if gradients is not None and recorder is not None and id(optimizer) in self.rows:
            is_open = id(optimizer) in self.rows[id(optimizer)].measured
            number = recorder.ring.number - (not is_open)
            name = type(scheduler).__name__
            self.evidence.schedule.stepped(number, gradients.name, name)

    # ---- Rows ---------------------------------------------------------------------------------

    def _measure(
        self,
        row: CurrentStep,
        optimizer: Optimizer,
        scale: Tensor | None = None,
        norms: Sequence[Tensor] | None = None,
    ) -> None:
        """Measure an optimizer's gradients.

        scale: their factor, None for 1.  norms: those that a clip has computed.
        """
        identity = id(optimizer)
        gradients, groups = self._known.get(identity), optimizer.param_groups
        is_same = gradients is not None and (
            list(map(id, groups[0]["params"])) == gradients.ids
            if len(groups) == 1
            else gradients.is_current()
        )
        if gradients is None or not is_same:
            gradients = self._meet(optimizer)
            row.measured.pop(identity, None)  # its parameters are no longer the same
        if row.rate is None:
            rate = groups[0].get("lr") if groups else None
            if type(rate) is not float:
                rate = gradients.rate()
                if isinstance(rate, Tensor):  # a schedule may change it in place
                    rate = rate.detach().clone()
            row.rate = rate
        losses: list[Tensor] = []
        if "loss" not in self._best_effort.lost:
            try:
                losses = self.passes.take(optimizer)
            except Exception as error:
                self._best_effort.lose("loss", error)
        row.losses.setdefault(identity, losses)  # an ascent's loss is the step's
        gradients.steps += 1
        step = self.closed_steps + 1
        measured = self._before_clip.pop(identity, None) if self._before_clip else None
        if measured is None:
            counts: Counts | None = None
            first = self._first_clips
            before = first.take(gradients.parameters) if first.known else None
            if before:
                norms = gradients.spread([each.norm for each in before])
                if (scale := before[0].scale) is not None:
                    self.evidence.scaled_clip(step, gradients.name, before[0].max_norm)
                present = (i for i, p in enumerate(gradients.parameters) if p.grad is not None)
                counts = {
                    i: each.nonfinite
                    for i, each in zip(present, before, strict=True)
                    if each.nonfinite
                }
            if gradients.figure not in self._best_effort.lost:
                try:
                    if norms is None:
                        norms = gradients.norms()
                    if norms and not counts and norms[0].is_cpu:
                        counts = self._nonfinite(row.scaler, gradients, norms)
                    if norms is not None:
                        factor = self._one if scale is None else scale
                        measured = norms, factor, counts or None
                except Exception as error:
                    self._best_effort.lose(gradients.figure, error)
        if measured is not None:
            row.measured[identity] = measured
            if self._diagnoses:
                self._diagnoses.measured(step, row, gradients, scale)
        if gradients.without_gradient:
            gradients.without_gradient = {
                i for i in gradients.without_gradient if gradients.parameters[i].grad is None
            }
        if gradients.without_gradient:
            self._best_effort(
                "missing gradients",
                partial(self.evidence.measured, has_changed=self.passes.has_changed(identity)),
                step,
                gradients,
            )

    def _nonfinite(
        self, scaler: GradScaler | None, gradients: Gradients, norms: Sequence[Tensor]
    ) -> Counts | None:
        """Return the counts of nonfinite elements in host memory, if there are any."""
        if scaler is not None:
            state = scaler._per_optimizer_states.get(id(gradients.optimizer), {})
            flags = state.get("found_inf_per_device")
            if flags:
                for flag in flags.values():
                    if flag.numpy():
                        return gradients.nonfinite(norms)
                return None
        elif self._reader.has_nonfinite or (self._is_settled and len(self._known) == 1):
            return None  # the first ones were reported, or the row is written at once
        return None if all(map(math.isfinite, norms)) else gradients.nonfinite(norms)

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
        if not self._drain_rows(RELAY_SECONDS):
            raise RuntimeError(
                f"the device has not finished its steps in {duration(RELAY_SECONDS)}"
            )
        self.passes.forget(id(optimizer)) if known is not None else None
        self._known[id(optimizer)] = gradients
        self._best_effort("optimizers", self.evidence.meets, self.closed_steps + 1, gradients)
        layout = Layout(
            {gradients.name: gradients.names for gradients in self._known.values()},
            has_rate=isinstance(gradients.rate(), Tensor),
            has_own_losses=len(self._known) > 1,
        )
        self._reader = self._reader.with_layout(layout)
        self.evidence.schedule.forget_rows()
        self._taking_part.clear()
        self._recorder = Recorder(
            self._reader, layout, gradients.device, self._started_at, self._arrived
        )
        self._one = self._recorder.one
        return gradients

    def _drain_rows(self, patience_seconds: float) -> bool:
        recorder = self._recorder
        if recorder is None:
            return True
        return recorder.drain(self._scale_of(self._closed_row), patience_seconds)

    def _scale_of(self, row: CurrentStep) -> Tensor:
        """Return a row's scale on the device, 1 without a scaler."""
        scale = None if row.scaler is None else row.scaler._scale
        return self._one if scale is None else scale

    def _name(self, optimizer: Optimizer) -> str:
        if self._wanted is not None:
            return self._wanted[id(optimizer)]
        name = type(optimizer).__name__
        others = [type(known.optimizer).__name__ for known in self._known.values()]
        return f"{name}{others.count(name) + 1}" if name in others else name

    def _write(self, row: CurrentStep, scale: Tensor, scale_after: Tensor | None) -> None:
        """Write a row with one operator. scale_after: None if it is the next row's scale."""
        recorder = self._recorder
        if recorder is None:
            return
        if row is not self._closed_row:
            recorder.set_scale_after(self._scale_of(self._closed_row))
        found_inf, factors, norms = [], [], []
        number, zero = recorder.ring.number, recorder.zero
        for identity, gradients in self._known.items():
            found_inf.append(row.found_inf.get(identity, zero))
            measured = row.measured.get(identity)
            if measured is None:
                factors.append(recorder.one)
                norms += gradients.no_norms
            else:
                own, factor, counts = measured
                norms += own
                factors.append(factor)
                if counts:
                    self._reader.count(number, gradients.name, counts)
        passes = self.passes
        references = passes.references
        losses: Sequence[Value] = self._explicit
        if (
            passes.is_settled
            and len(references) == 1
            and references[0][0]._version == references[0][1]
        ):
            references.clear()
            is_kept = True
        else:
            is_kept = passes.has_kept_losses()
        if is_kept and not losses:
            for losses in row.losses.values():
                if losses:
                    break
        if (
            not losses
            or len(row.losses) > 1
            or row.is_special
            or not row.stepped >= row.found_inf.keys()
        ):
            self._note(number, row, has_loss=bool(losses))
        if row.version is not None and row.version != (id(scale), scale._version):
            self._scale_was_set(row, number)
        others: list[Tensor] = []
        if recorder.layout.has_rate:
            others.append(row.rate if isinstance(row.rate, Tensor) else zero)
        if recorder.layout.has_own_losses:
            others += [recorder.mean(row.losses.get(identity) or ()) for identity in self._known]
        loss = losses[0] if len(losses) == 1 else math.nan
        if not isinstance(loss, Tensor):
            loss = recorder.mean(losses)
        recorder.write(loss, scale, found_inf, factors, norms, others, scale_after)
        if row.scaler is None and recorder.ring.readable is not None:
            self._count_nonfinite(row, number)

    def _scale_was_set(self, row: CurrentStep, number: int) -> None:
        """Note that the loop has changed the scale since the last update."""
        recorder, scaler = self._recorder, row.scaler
        is_next = recorder is not None and row is self._closed_row
        if is_next and recorder is not None and scaler and not recorder.knows_scale_after:
            self._reader.note(number).set_after = ScalerRule(
                scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
            )

    def _count_nonfinite(self, row: CurrentStep, number: int) -> None:
        """Count the nonfinite elements of a row without a scaler, which the host can read."""
        recorder = self._recorder
        if recorder is None or recorder.ring.readable is None or self._reader.has_nonfinite:
            return
        values = recorder.ring.readable[number % RING_ROWS]
        if not math.isfinite(values[recorder.layout.norms].sum()):
            for identity, (norms, _factor, counts) in row.measured.items():
                if counts is None:
                    gradients = self._known[identity]
                    self._reader.count(number, gradients.name, gradients.nonfinite(norms))

    def _note(self, number: int, row: CurrentStep, *, has_loss: bool) -> None:
        """Note the facts about a row that only the host has."""
        row.is_special = False
        if not has_loss:
            self._reader.note(number).has_loss = False
        if row.is_continued:
            self._reader.note(number).is_continued = True
            row.is_continued = False
        if row.has_replaced:
            self._reader.note(number).replaced = True
            row.has_replaced = False
        if row.direct:
            self._reader.note(number).is_direct = True
        elif row.found_inf and not row.is_by_hand and not row.stepped >= row.found_inf.keys():
            self._reader.note(number).is_stepped = bool(row.stepped)
            self._best_effort("steps left out", self.evidence.not_stepped, self.closed_steps + 1)
        if len(row.losses) > 1 and not _are_one(list(row.losses.values())):
            known = list(self._known)
            own = [known.index(identity) for identity, losses in row.losses.items() if losses]
            self._reader.note(number).own_losses = own

    def _close_unscaled(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            self._write(self._unscaled, recorder.one, recorder.one)
            self._close(self._unscaled, recorder.one, self._ended)

    def _close(self, row: CurrentStep, scale_after: Tensor, ended: float | None = None) -> None:
        """Close the written row, and start the next step's time. ended: None for now."""
        recorder = self._recorder
        if recorder is None or self._step_started is None:
            return
        self.closed_steps += 1
        if self._first_clips.known:
            self._first_clips.forget()
        step, number = self.closed_steps, recorder.ring.number
        if len(row.measured) < len(self._known):
            self._taking_part[number] = [known in row.measured for known in self._known]
        if row.number:
            self._reader.belongs(number, row.number)
        ring = recorder.ring
        if self._diagnoses:
            rows = ring.readable
            scale = ring.row[SCALE] if rows is None else float(rows[number % RING_ROWS, SCALE])
            self._diagnoses.closed(step, row, scale)
        evidence, rows = self.evidence, ring.readable
        origin, was_skipped = evidence.origin, False
        if rows is not None:
            place = number % RING_ROWS
            for column in recorder.layout.flags:  # item() takes a tenth of any()
                was_skipped = was_skipped or rows.item(place, column) != 0
        if row.scaler is not None and (
            was_skipped
            or evidence.in_a_row
            or origin.left
            or origin.is_armed
            or evidence.host_copies.sent
            or evidence.inputs is not None
        ):
            self._best_effort("origin", self._close_evidence, step, row)
        self.passes.is_over = True
        rate = row.rate if isinstance(row.rate, float) else 0.0
        if row.stepped:
            row.ascents = 0
        for each in row.of_step:
            each.clear()
        row.rate, row.is_by_hand = None, False
        if self._explicit:
            self._explicit = []
        self._closed_row = row
        if ended is None:
            ended = time.perf_counter()
        seconds, self._step_started = ended - self._step_started, ended
        until = ring.close(step, seconds, rate)
        if until is not None:
            recorder.send(until, scale_after)

    def _close_evidence(self, step: int, row: CurrentStep) -> None:
        """Pass on the flags, scale and loss of the written row."""
        recorder = self._recorder
        if recorder is None:
            return
        ring = recorder.ring
        rows = ring.readable
        numbers = ring.row if rows is None else rows[ring.number % RING_ROWS].tolist()
        found_inf = [numbers[recorder.layout.found_inf.start + i] for i in range(len(self._known))]
        flags = dict(zip(self._known, found_inf, strict=True))
        own = {identity: flags[identity] for identity in row.found_inf}
        self.evidence.closed(step, row, self._known, numbers[SCALE], own, numbers[LOSS])

    def _look_outside_optimizers(self) -> None:
        self._has_looked = True
        if self._wanted is None:
            self._best_effort(
                "parameters without an optimizer",
                self.evidence.outside_optimizers,
                self.closed_steps,
                self._names,
                list(self._known.values()),
            )

    def _arrived(self, first: int, rows: Rows, records: Steps, events: list[Event]) -> None:
        if self.closed_steps >= STEPS_OF_OPTIMIZERS and not self._has_looked:
            self._look_outside_optimizers()
        self._on_steps(records)
        if self._recorder is not None and (records["flags"] & (SKIPPED | NONFINITE_LOSS)).any():
            self._recorder.ring.hurry()
        for event in events:
            if not isinstance(event, NonfiniteGradients):
                self._on_event(event)
        self._best_effort("evidence", self._read_evidence, first, rows, records, events)
        if self._diagnoses:
            self._diagnoses.report()

    def _read_evidence(self, first: int, rows: Rows, records: Steps, events: list[Event]) -> None:
        recorder, names = self._recorder, [gradients.name for gradients in self._known.values()]
        examined = range(first, first + len(records))
        if not self._taking_part and not (records["flags"] & SKIPPED).any():
            # Usually; the newest row is examined, because a schedule may still step after it.
            self.evidence.schedule.applied(examined[:-1], len(names))
            examined = examined[-1:]
        taking_part = [self._taking_part.pop(number, None) for number in examined]
        latest = records[len(records) - len(examined) :]
        skips = skips_of(latest, names, taking_part)
        is_known = recorder is None or recorder.ring.readable is not None
        self.evidence.arrived(
            list(zip(examined, latest["step"].tolist(), skips, strict=True)),
            records,
            events,
            None if is_known or recorder is None else rows[:, recorder.layout.norms],
            is_scaled=bool(self.rows),
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
        if len(self._open) == 1 and scaler._growth_tracker is None:
            self._reader.applied = getattr(scaler, "_init_growth_tracker", None)
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


def _joint(flags: Mapping[torch.device, Tensor]) -> Tensor:
    """Return the sum of several devices' flags, on the first device."""
    first, *others = flags.values()
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    return first.reshape(()) if first.ndim else first


def _number(tensor: Tensor) -> Value:
    """Return a number that the host can read without a wait, else the tensor."""
    value = (
        float(tensor.detach().numpy())
        if tensor.is_cpu and tensor.dtype is torch.float32 and type(tensor) is Tensor
        else value_on_host(tensor)
    )
    return tensor if value is None else value


def _shares(outer: Optimizer, inner: Optimizer) -> bool:
    """Return True if two optimizers share a parameter."""
    own = {id(p) for group in outer.param_groups for p in group["params"]}
    return any(id(p) in own for group in inner.param_groups for p in group["params"])


def _are_one(losses: list[list[Tensor]]) -> bool:
    """Return True if all optimizers have the losses of the same backward passes."""
    first = losses[0]
    return all(
        len(other) == len(first) and all(a is b for a, b in zip(other, first, strict=True))
        for other in losses[1:]
    )
