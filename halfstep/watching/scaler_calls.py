"""Calls of a loop's scalers, in the order of a step. This module imports torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from halfstep.watching.current_step import CurrentStep
from halfstep.watching.measurement import Measurement
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.state import LoopState

STEPPED = OptState.STEPPED
DEFAULT_SCALE = 2.0**16  # with which a GradScaler begins
PRIVATE = ("_per_optimizer_states", "_scale", "_growth_tracker")


class ScalerCalls:
    """Listener to scalers: a row closes at each `GradScaler.update()`."""

    def __init__(
        self,
        state: LoopState,
        rows: RowWriter,
        measurement: Measurement,
        scaler: GradScaler | None,
    ) -> None:
        """scaler: the only one to observe, None for all."""
        self._state, self._rows, self._measurement = state, rows, measurement
        self._scaler = scaler
        self._loaded: WeakSet[Any] = WeakSet()  # scalers whose state was restored
        self._loaded_optimizers: WeakSet[Optimizer] = WeakSet()  # the same
        #: Handle the end of `unscale_`, before a clip can spread a NaN, or of an inf check that has
        #: left gradients multiplied by the scale. (A partial is no further call in each step.)
        self.unscaled = partial(self._measure_scaled, True)
        self.checked = partial(self._measure_scaled, False)

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler that was called last, or the only one to observe."""
        return self._state.current.scaler or self._scaler

    def on_scale(self, scaler: GradScaler, result: object, outputs: object) -> None:
        """Record the scaled losses."""
        state = self._state
        row = state.open_rows.get(id(scaler)) or self._meet_scaler(scaler)
        if row is not None:
            state.current = row
            if "loss" not in state.best_effort.lost:
                try:
                    state.passes.record_scaling(result, outputs)
                except Exception as error:
                    state.best_effort.lose("loss", error)

    def _measure_scaled(
        self, is_unscaled: bool, scaler: GradScaler, _result: object, optimizer: Optimizer
    ) -> None:
        state = self._state
        row = state.open_rows.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        identity = id(optimizer)
        before = state.row_of.get(identity)
        if before is not row:
            if not state.is_wanted(optimizer):
                return
            state.row_of[identity] = row
            if before is not None and row.number is None and not before.measured:
                self._replace(before, row)
        if identity in row.measured:  # before a clip
            return
        if is_unscaled and identity in state.clipping and identity in state.known:
            row.pending.add(identity)
            state.has_pending = True
            return
        own = state.passes.own.get(identity) if state.passes.plain is None else None
        has_unscaled = own is not None and own.has_unscaled()
        self._measurement.measure(row, optimizer, None if is_unscaled else scaler._scale)
        if has_unscaled and identity in state.known:
            state.best_effort(
                "unscaled losses",
                state.evidence.record_unscaled_loss,
                state.closed_steps + 1,
                state.known[identity].name,
            )

    def measure_pending(self) -> None:
        """Measure gradients whose clip did not come."""
        state = self._state
        state.has_pending = False
        for row in state.open_rows.values():
            if row.pending:
                self._measurement.measure_pending(row)

    def updating(self, scaler: GradScaler, new_scale: object = None) -> None:
        """Read flags and scale before `update` changes them in place."""
        state = self._state
        row = state.open_rows.get(id(scaler)) or self._meet_scaler(scaler)
        if row is None:
            return
        if row.number is None:
            row.number, state.scalers = state.scalers, state.scalers + 1
            self._look_for_restored(row)
        scale, recorder = scaler._scale, self._rows.recorder
        if scale is None:
            return
        if row.pending:
            self._measurement.measure_pending(row)
        if state.passes.since_step:
            state.best_effort("loss", state.passes.updating, scaler, scale)
        if recorder is None:
            return
        for optimizer, own in scaler._per_optimizer_states.items():
            if own.get("stage") is STEPPED:
                row.stepped.add(optimizer)
            if optimizer in row.measured and (flags := own["found_inf_per_device"]):
                [flag] = flags.values() if len(flags) == 1 else (_joint(flags),)
                row.found_inf[optimizer] = flag if not flag.ndim else flag.reshape(())
        if row.found_inf:
            if row.stepped or row.direct or not self._is_ascent(row):
                is_set = new_scale is not None or row.number
                self._rows.write(row, scale, scale if is_set else None)
                return
        elif new_scale is None:
            return
        if row is self._rows.closed_row:  # this update is no step's
            recorder.set_scale_after(scale)

    def on_update(self, scaler: GradScaler, result: object, new_scale: object = None) -> None:
        """Close the row; a scale set by hand shows in the next row, as "set"."""
        row, recorder = self._state.open_rows.get(id(scaler)), self._rows.recorder
        if row is None or recorder is None or (after := scaler._scale) is None:
            return
        if not row.found_inf:
            is_tracked = row.version is not None and row is self._rows.closed_row
            if is_tracked and recorder.knows_scale_after:
                row.version = id(after), after._version
            return
        is_torchs = isinstance(scaler, GradScaler)
        row.version = (id(after), after._version) if is_torchs else None
        if not (row.stepped or row.direct) and self._is_ascent(row):
            row.ascents += 1
            row.is_continued, row.is_by_hand, row.is_special = True, False, True
            for by_id in (row.measured, row.found_inf, row.clips):
                by_id.clear()
            return
        if (row.number or not is_torchs) and new_scale is None:
            recorder.set_open_scale_after(after)
        self._rows.close(row, after)

    def on_load(self, scaler: GradScaler, result: Any, *_state: object, **_states: object) -> None:
        """Record that a scaler's state was restored."""
        self._loaded.add(scaler)
        self._rows.reader.applied = None

    def on_load_optimizer(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's state was restored."""
        state, evidence = self._state, self._state.evidence
        if optimizer.state:
            self._loaded_optimizers.add(optimizer)
            check, step = evidence.checks.check_loaded, state.step + 1
            state.best_effort("loaded states", check, step, optimizer, evidence.host_copies)

    def _look_for_restored(self, row: CurrentStep) -> None:
        """Note that a new scaler steps an optimizer that was restored, and was not itself.

        One that begins at a scale of the script's choice may have been restored by hand.
        """
        first_scale = getattr(row.scaler, "_init_scale", None)  # a framework's has none
        if row.scaler in self._loaded or first_scale != DEFAULT_SCALE:
            return
        for identity in row.measured:
            gradients = self._state.known.get(identity)
            if gradients is not None and gradients.optimizer in self._loaded_optimizers:
                row.restored, row.is_special = gradients.name, True

    def on_error(self, scaler: GradScaler, method: str, error: Exception) -> None:
        """Record the exception with which a scaler refused a call."""
        state = self._state
        state.best_effort(
            "refused calls",
            state.evidence.checks.record_exception,
            state.closed_steps + 1,
            method,
            error,
            list(state.known.values()),
        )

    def _meet_scaler(self, scaler: GradScaler) -> CurrentStep | None:
        """Return a new row for a new scaler, or None if it is not to be observed."""
        state = self._state
        if not scaler._enabled or self._scaler not in (None, scaler):
            return None
        _check_attributes(scaler)
        state.start()
        row = state.open_rows[id(scaler)] = CurrentStep(scaler)
        if len(state.open_rows) == 1 and scaler._growth_tracker is None:
            self._rows.reader.applied = getattr(scaler, "_init_growth_tracker", None)
        if state.unscaled.stepped:
            self._rows.close_unscaled()
        return row

    def _is_ascent(self, row: CurrentStep) -> bool:
        """Return True if the scaler was updated within a step, as by SAM's first half.

        The loop moved the weights by hand, and the optimizer's step follows.
        """
        own = self._state.passes.own
        row.is_by_hand = all(key in own and own[key].has_moved() for key in row.measured)
        return row.is_by_hand and not row.ascents

    def _replace(self, before: CurrentStep, row: CurrentStep) -> None:
        """Continue a scaler's rows with the scaler that replaced it for an optimizer."""
        state = self._state
        row.number = before.number
        if before.scaler is not None and before not in state.row_of.values():
            state.open_rows.pop(id(before.scaler), None)
        row.has_replaced = row.is_special = row.scaler not in self._loaded


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
