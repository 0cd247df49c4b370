"""Step-by-step record of a user's training loop, from the wrapped torch functions.

With a scaler a row closes at each `GradScaler.update()`, without one after each iteration. Each
optimizer has its own losses (see backward_passes.py); nothing is averaged over optimizers. An error
loses only the figure that could not be read (see evidence/best_effort.py). Nothing here waits for
the device, except for a new optimizer in the middle of a run. This module imports torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.recording.gradients import module_names, parameter_names
from halfstep.telemetry.events import Event
from halfstep.telemetry.spool import Steps
from halfstep.watching.arrivals import Arrivals
from halfstep.watching.async_host_copy import has_arrived
from halfstep.watching.backward_passes import MILESTONES
from halfstep.watching.clips import Clips
from halfstep.watching.diagnoses import Intervals
from halfstep.watching.measurement import Measurement, number_on_host
from halfstep.watching.optimizer_steps import SETTLED_AFTER, OptimizerSteps
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.scaler_calls import ScalerCalls
from halfstep.watching.state import LoopState

NEVER = Intervals()


class Loop:
    """Listener that has one row per step written, and hands rows over once they are on the host."""

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
        self._started_at = clock() if started_at is None else started_at
        self.state = LoopState(on_event, say, optimizers, step, every)
        self._arrivals = Arrivals(self.state, on_steps, on_event)
        self.rows = RowWriter(self.state, self._started_at, every.layers, self._arrivals.receive)
        parts = self.state, self.rows, Measurement(self.state, self.rows)
        self.scalers = ScalerCalls(*parts, scaler)
        self.optimizers, self.clips = OptimizerSteps(*parts), Clips(*parts)
        self.passes, self.evidence = self.state.passes, self.state.evidence
        self._uncleared: dict[int, Tensor | None] = {}  # gradient norms by an optimizer's id

    @property
    def step(self) -> int:
        """The last step; without a scaler, the iteration under way once it has stepped."""
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        self.state.closed_steps = step

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer has been observed."""
        return bool(self.state.known)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that name the parameters."""
        return self.state.modules

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler that was called last, or the only one to observe."""
        return self.scalers.scaler

    def add(self, modules: tuple[nn.Module, ...]) -> None:
        """Name parameters as these modules do."""
        state = self.state
        state.modules += modules
        state.names |= parameter_names(modules)
        names = module_names(modules)
        state.evidence.add(modules, names)
        state.best_effort("buffers", state.evidence.meet_buffers, modules)
        if state.diagnoses:
            state.diagnoses.add(names)
            state.diagnoses.starts(state.closed_steps + 1)

    def end(self) -> None:
        """Remove the hooks that evidence and diagnoses have installed."""
        state = self.state
        if state.diagnoses:
            state.diagnoses.end()

    def close(self) -> None:
        """Close the iteration under way, and report the remaining evidence."""
        state = self.state
        if state.unscaled.stepped:
            self.rows.close_unscaled()
        if state.closed_steps >= SETTLED_AFTER:
            self._arrivals.look_outside_optimizers()
        own = state.passes.own
        known = [
            (gradients, key in own and own[key].has_changed)
            for key, gradients in state.known.items()
        ]
        state.best_effort("evidence", state.evidence.end, state.closed_steps, known)

    def add_loss(self, loss: Tensor | float) -> None:
        """Set the next row's loss; several calls are averaged."""
        self.state.start()
        if isinstance(loss, Tensor):
            loss = loss.detach().float()
            loss = loss.mean() if loss.ndim else loss.clone()
        self.rows.explicit.append(loss)

    def elapsed_ms(self) -> int:
        """Return milliseconds since started_at."""
        return int((clock() - self._started_at) * 1000)

    def drain(self, patience_seconds: float) -> bool:
        """Hand over the rows that are on the device; return True if all arrived in time."""
        state = self.state
        self._arrivals.is_last = True
        has_all = self.rows.drain(patience_seconds)
        self._arrivals.is_last = False
        if state.diagnoses:
            state.diagnoses.report(wait=has_all)
        state.best_effort("evidence", partial(state.evidence.drain, wait=has_all))
        return has_all

    def write_early(self, on_steps: Callable[[Steps], None]) -> None:
        """Write closed rows in another thread; the loop reads evidence from them later.

        on_steps: receives their records.
        """

        def write(records: Steps, events: list[Event]) -> None:
            on_steps(records)
            self._arrivals.write_events(events)

        if (recorder := self.rows.recorder) is not None:
            recorder.write_early(write, self.rows.left_scale, has_arrived)

    def backward_begins(self, roots: Any, arguments: tuple[Any, ...], accumulates: bool) -> None:
        """Record a pass's loss, and inspect the roots that it starts from."""
        state = self.state
        if state.step_started is None:
            state.start()
        scaler, passes, evidence = state.current.scaler, state.passes, state.evidence
        if (
            (evidence.skips.in_a_row > 1 or passes.suspected)
            and accumulates
            and not passes.since_step
        ):
            state.best_effort("uncleared gradients", self._look_for_uncleared)
        count = passes.count
        scale = None if scaler is None else scaler._scale
        losses = state.best_effort("loss", passes.begins, roots, arguments, accumulates, scale)
        if passes.is_dropped and passes.dropped in MILESTONES and scale is not None:
            number = state.closed_steps + 1
            state.best_effort("evidence", evidence.record_dropped, number, passes.dropped, scale)
        numbers = None if losses is None else [number_on_host(loss) for loss in losses]
        if passes.count != count and evidence.is_due(passes.count, numbers):
            state.best_effort(
                "evidence",
                partial(evidence.pass_begins, has_stepped=bool(state.known)),
                state.closed_steps + 1,
                passes.count,
                roots,
                numbers,
            )

    def backward_ends(self) -> None:
        """Record which optimizers' gradients the pass changed."""
        state = self.state
        if "loss" not in state.best_effort.lost:
            try:
                state.passes.ends()
            except Exception as error:
                state.best_effort.lose("loss", error)
        if self._uncleared and not state.passes.is_under_way:
            state.best_effort("uncleared gradients", self._report_uncleared)

    def validation_begins(self) -> None:
        """Arm a validation: a module is about to be set to evaluation."""
        armed = self.state.evidence.armed
        self.state.best_effort("shadow steps", armed.begin_validation, self.state.step)

    def schedule_steps(self, scheduler: object) -> None:
        """Record a scheduler's step, after its optimizer's last attempt."""
        self.state.best_effort("schedule", self._schedule, scheduler)

    def _look_for_uncleared(self) -> None:
        """Measure gradients not cleared since the last step, before a pass adds to them."""
        state = self.state
        suspected, state.passes.suspected = state.passes.suspected, set()
        for identity in state.passes.list_uncleared():
            is_skipped = state.evidence.skips.in_a_row > 1 and identity in state.row_of
            is_due = is_skipped or identity in suspected
            if is_due and (gradients := state.known.get(identity)):
                self._uncleared[identity] = gradients.norms_now()

    def _report_uncleared(self) -> None:
        """Keep uncleared gradients to which the pass has added, until their optimizer steps."""
        state = self.state
        for identity, norms in self._uncleared.items():
            if norms is not None and identity in state.passes.changed:
                state.uncleared[identity] = norms
        self._uncleared.clear()

    def _schedule(self, scheduler: Any) -> None:
        state = self.state
        optimizer = scheduler.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # as Accelerate wraps it
        gradients, recorder = state.known.get(id(optimizer)), self.rows.recorder
        if gradients is not None and recorder is not None and id(optimizer) in state.row_of:
            is_open = id(optimizer) in state.row_of[id(optimizer)].measured
            number = recorder.ring.number - (not is_open)
            name = type(scheduler).__name__
            state.evidence.schedule.record_step(number, gradients.name, name)
