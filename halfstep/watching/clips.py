"""Clips of gradients, whose norms are kept. This module imports torch."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.recording.gradients import Gradients
from halfstep.watching.current_step import MOST_CLIPS, ClipOfStep, CurrentStep
from halfstep.watching.measurement import Measurement, number_on_host
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.state import LoopState


class Clips:
    """Listener to clips of gradients, by norm or by value."""

    def __init__(self, state: LoopState, rows: RowWriter, measurement: Measurement) -> None:
        self._state, self._rows, self._measurement = state, rows, measurement
        #: Norms that a clip is about to use, of the gradients that it was given.
        self.norms: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
        self.total: Tensor | None = None  # the L2 norm that a clip is about to use

    def clipping(self, parameters: Any, max_norm: Any, total_norm: object) -> None:
        """Measure gradients before a clip, and report a clip of still scaled gradients."""
        state = self._state
        clip, self.norms = self.norms, None
        total, self.total = self.total, None
        if "clip" in state.best_effort.lost:
            return
        try:
            several = [parameters] if isinstance(parameters, Tensor) else parameters
            norms = None if clip is None else clip[1]
            of_step = None
            if total is not None and total is total_norm:
                limit = number_on_host(max_norm) if isinstance(max_norm, Tensor) else max_norm
                if not isinstance(limit, Tensor):  # else the host would have to wait for it
                    of_step = ClipOfStep(list(map(id, several)), several, float(limit))
            if self._rows.recorder is None:  # no optimizer is known yet
                self._measure_first(several, max_norm, norms, of_step)
                return
            is_first = True
            ids = list(map(id, several)) if of_step is None else of_step.ids
            for identity, gradients in state.known.items():
                is_plain = norms is not None and len(norms) == len(ids) and gradients.is_in_order
                if is_plain and gradients.clipped == ids:
                    of_clip = norms
                else:
                    of_clip = None if norms is None else gradients.norms_of_clip(several, norms)
                row = state.row_of.get(identity)
                is_clipped = of_clip is not None or gradients.is_among(several)
                is_first = is_first and not is_clipped
                if is_clipped and of_step is not None:
                    if row is not None and (identity in row.measured or identity in row.pending):
                        clips = row.clips
                    else:
                        clips = state.clips_ahead.setdefault(identity, {})
                    clips[id(of_step)] = of_step
                    if len(clips) > MOST_CLIPS:  # of a loop that clips without steps
                        del clips[next(iter(clips))]
                if row is not None and identity in row.pending and of_clip is not None:
                    row.pending.discard(identity)
                    state.has_pending = bool(row.pending)
                    self._measurement.measure(row, gradients.optimizer, None, of_clip)
                elif is_clipped:
                    self._measure_clipped(gradients, row, max_norm, total_norm, of_clip)
            if is_first:  # of an optimizer that is not known yet
                self._measure_first(several, max_norm, norms, of_step)
        except Exception as error:
            state.best_effort.lose("clip", error)

    def on_clip(self) -> None:
        """Recognize gradients that a clip has changed."""
        state = self._state
        state.best_effort("loss", state.passes.on_clip)
        if state.first_clips.known:
            state.best_effort("clip", state.first_clips.on_clip)

    def _measure_first(
        self,
        parameters: Sequence[Tensor],
        max_norm: object,
        norms: Sequence[Tensor] | None,
        clip: ClipOfStep | None,
    ) -> None:
        """Measure gradients of which no optimizer is known."""
        state = self._state
        scaler = state.current.scaler if state.passes.is_scaled else None
        scale = None if scaler is None else scaler._scale
        state.first_clips.measure(parameters, max_norm, scale, norms, clip)

    def clipping_values(self, gradients: Sequence[Tensor]) -> None:
        """Report a clip of the elements of still scaled gradients."""
        self._state.best_effort("clip", self._clip_values, gradients)

    def _measure_clipped(
        self,
        gradients: Gradients,
        row: CurrentStep | None,
        max_norm: object,
        total_norm: object,
        norms: Sequence[Tensor] | None,
    ) -> None:
        """Measure gradients that are about to be clipped, and were not known to be.

        row: of their scaler, if any.  norms: theirs, if the clip has computed them.
        """
        state = self._state
        optimizer = gradients.optimizer
        identity, groups = id(optimizer), optimizer.param_groups
        is_same = len(groups) == 1 and list(map(id, groups[0]["params"])) == gradients.ids
        if not (is_same or gradients.is_current()):
            if row is not None:
                return
            gradients, norms = self._rows.meet(optimizer), None
        if row is not None and identity in row.pending:  # the clip has other norms
            self._measurement.measure_pending(row)
        elif row is None or row is not state.current or row.scaler is None:
            if state.current is state.unscaled:
                norm = number_on_host(total_norm) if isinstance(total_norm, Tensor) else math.nan
                if bare := norms or gradients.norms():
                    is_finite = isinstance(norm, Tensor) or math.isfinite(norm)
                    counts = None if is_finite else gradients.nonfinite(bare)
                    state.before_clip[identity] = bare, state.one, counts
                if state.evidence.skips.is_for_clip(norm):
                    loss = state.passes.latest_loss
                    number = math.nan if loss is None else number_on_host(loss)
                    state.evidence.skips.record_clip(state.step, norm, number, optimizer)
        elif self._is_clip_early(row.scaler, identity):
            self._measurement.measure(row, optimizer, row.scaler._scale, norms)
            state.evidence.record_scaled_clip(state.closed_steps + 1, gradients.name, max_norm)
        elif norms is not None:
            state.clipping.add(identity)  # from the next step on

    def _clip_values(self, clipped: Sequence[Tensor]) -> None:
        state = self._state
        identities = set(map(id, clipped))
        for identity, gradients in state.known.items():
            first = next((p.grad for p in gradients.parameters if p.grad is not None), None)
            row = state.row_of.get(identity)
            if row is None or row is not state.current or row.scaler is None:
                continue
            if id(first) in identities and self._is_clip_early(row.scaler, identity):
                state.evidence.record_scaled_clip(state.closed_steps + 1, gradients.name, None)

    def _is_clip_early(self, scaler: GradScaler, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are still scaled. optimizer: its id."""
        states = scaler._per_optimizer_states
        stage = states[optimizer].get("stage") if optimizer in states else None
        return getattr(stage, "name", "READY") == "READY" and self._state.passes.is_scaled
