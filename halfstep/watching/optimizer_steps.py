"""Steps of a loop's optimizers without a scaler, or past it. This module imports torch.

Without a scaler, a row is an iteration: it closes once every known optimizer has stepped, or before
a step of an optimizer that has already stepped in it or that began the first iteration.
"""

import time
from functools import partial

from torch.optim import AdamW, Optimizer

from halfstep.watching.current_step import CurrentStep
from halfstep.watching.measurement import Measurement
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.state import LoopState

SETTLED_AFTER = 8  # iterations after which no further optimizer is expected


class OptimizerSteps:
    """Listener to the steps of optimizers."""

    def __init__(self, state: LoopState, rows: RowWriter, measurement: Measurement) -> None:
        self._state, self._rows, self._measurement = state, rows, measurement
        self.stepping: list[Optimizer] = []  # optimizers inside `step`, outermost first
        self.scaler_steps = 0  # calls of GradScaler.step under way
        self._leader: int | None = None  # the optimizer that began the first iteration
        self._iterations = 0  # without a scaler, since a new optimizer was seen

    def record_nested(self, optimizer: Optimizer) -> None:
        """Record a step inside another one; if it is already on the stack, it had raised."""
        stepping = self.stepping
        while any(outer is optimizer for outer in stepping):
            stepping.pop()
        if stepping and _shares(stepping[-1], optimizer):  # the inner step may clear gradients
            self._state.best_effort("gradient norms", self._measure_within, stepping[0])
        stepping.append(optimizer)

    def on_step(self, optimizer: Optimizer) -> None:
        """Record a step, unless it is part of another optimizer's, as in SAM."""
        state = self._state
        is_any = state.wanted is None and not state.ignored
        if not (is_any or state.is_wanted(optimizer)) or (
            self.stepping
            and any(state.is_wanted(o) and _shares(o, optimizer) for o in self.stepping)
        ):
            return
        if "steps" not in state.best_effort.lost:
            try:
                self._record_step(optimizer)
            except Exception as error:
                state.best_effort.lose("steps", error)

    def _measure_within(self, outer: Optimizer) -> None:
        """Measure an optimizer's gradients before an inner optimizer's step."""
        state = self._state
        gradients = state.known.get(id(outer))
        if gradients is not None and gradients.is_current() and state.is_wanted(outer):
            norms = gradients.norms()
            if norms is not None:
                state.before_clip[id(outer)] = norms, state.one, None

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record a step without a scaler, or one that bypasses the scaler."""
        state = self._state
        identity = id(optimizer)
        scaled = state.row_of.get(identity)
        if scaled is not None:
            is_unscaled = identity in scaled.measured
            if is_unscaled or not state.passes.since_step:
                self._step_directly(optimizer, scaled, is_scaled=False)
                return
            if scaled is state.current and state.passes.is_scaled:
                self._step_directly(optimizer, scaled, is_scaled=True)
                return
            state.current = state.unscaled  # the scaler is no longer used
        row = state.current
        if row is not state.unscaled:
            if identity not in row.measured:
                is_scaled = state.passes.holds_scaled(identity)
                scale = row.scaler._scale if row.scaler is not None and is_scaled else None
                self._measurement.measure(row, optimizer, scale)
                row.stepped.add(identity)
                if is_scaled:
                    self._step_directly(optimizer, row, is_scaled=True)
                return
            # The scaler is used for its losses only: it never updates.
            if state.passes.is_scaled and not _is_free_of_scale(optimizer):
                state.best_effort(
                    "direct steps",
                    partial(state.evidence.direct_step, is_scaled=True),
                    state.closed_steps + 1,
                    state.known[identity].name,
                )
            scale = state.one if row.version is None else self._rows.scale_of(row)
            self._rows.write(row, scale, scale)
            self._rows.close(row, scale)
            self._measurement.measure(row, optimizer)
            row.stepped.add(identity)
            return
        if identity not in state.known:  # it may step in only some iterations
            self._iterations = 0
            self._rows.close_of_gone()  # or be made for each task
        if self._leader not in state.known:
            self._leader = identity
        if row.stepped and (identity in row.stepped or identity == self._leader):
            self._rows.close_unscaled()
            self._iterations += 1
            state.is_settled |= self._iterations >= SETTLED_AFTER
        row.stepped.add(identity)
        self._measurement.measure(row, optimizer)
        state.ended = time.perf_counter()
        expected = state.known.keys() if state.wanted is None else state.wanted.keys()
        if state.is_settled and row.stepped >= expected:
            self._rows.close_unscaled()

    def _step_directly(self, optimizer: Optimizer, row: CurrentStep, *, is_scaled: bool) -> None:
        """Record an optimizer's step without its scaler, which applies inf unchanged."""
        state = self._state
        identity, recorder = id(optimizer), self._rows.recorder
        step = state.closed_steps
        if identity in row.measured or is_scaled:
            step += 1
            if identity in state.row_of:
                row.direct.add(identity)
                row.is_special = True
            row.stepped.add(identity)
        elif recorder is not None:
            ring = recorder.ring
            ring.holds_last = True
            if ring.is_here(ring.number - 1):
                self._rows.reader.note(ring.number - 1).is_direct = True
        name = state.known[identity].name
        state.best_effort(
            "direct steps", partial(state.evidence.direct_step, is_scaled=is_scaled), step, name
        )


def _is_free_of_scale(optimizer: Optimizer) -> bool:
    """Return whether a constant factor of all gradients changes no step, as with Adam.

    An L2 penalty is added to the gradients, and has no factor.
    """
    has_moments = "exp_avg_sq" in next(iter(optimizer.state.values()), ())
    is_decoupled = isinstance(optimizer, AdamW)
    return has_moments and all(
        is_decoupled or not group.get("weight_decay") for group in optimizer.param_groups
    )


def _shares(outer: Optimizer, inner: Optimizer) -> bool:
    """Return True if two optimizers share a parameter."""
    own = {id(p) for group in outer.param_groups for p in group["params"]}
    return any(id(p) in own for group in inner.param_groups for p in group["params"])
