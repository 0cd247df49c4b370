"""Measurement of an optimizer's gradients, before a clip. This module imports torch."""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.recording.gradients import Gradients, value_on_host
from halfstep.recording.reader import Counts
from halfstep.watching.current_step import CurrentStep, Value
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.state import LoopState


class Measurement:
    """Takes norms of gradients, or those that a clip has computed."""

    def __init__(self, state: LoopState, rows: RowWriter) -> None:
        self._state, self._rows = state, rows

    def measure(
        self,
        row: CurrentStep,
        optimizer: Optimizer,
        scale: Tensor | None = None,
        norms: Sequence[Tensor] | None = None,
    ) -> None:
        """Measure an optimizer's gradients.

        scale: their factor, None for 1.  norms: those that a clip has computed.
        """
        state = self._state
        identity = id(optimizer)
        gradients, groups = state.known.get(identity), optimizer.param_groups
        is_same = gradients is not None and (
            list(map(id, groups[0]["params"])) == gradients.ids
            if len(groups) == 1
            else gradients.is_current()
        )
        if gradients is None or not is_same:  # its parameters are no longer those measured before
            row.measured.pop(identity, None)
            state.before_clip.pop(identity, None)
            gradients, norms = self._rows.meet(optimizer), None
        if state.clips_ahead:
            row.clips.update(state.clips_ahead.pop(identity, {}))
        if row.rate is None:
            rate = groups[0].get("lr") if groups else None
            if type(rate) is not float:
                rate = gradients.rate()
                if isinstance(rate, Tensor):  # a schedule may change it in place
                    rate = rate.detach().clone()
            row.rate = rate
        losses: list[Tensor] = []
        if "loss" not in state.best_effort.lost:
            try:
                losses = state.passes.take(optimizer)
            except Exception as error:
                state.best_effort.lose("loss", error)
        if state.passes.first_scales and identity in state.passes.first_scales:
            scaler, first_scale = state.passes.first_scales.pop(identity)
            if scaler is row.scaler and scaler._scale is not None:  # not that of another optimizer
                number, name = state.closed_steps + 1, gradients.name
                state.evidence.record_mixed_scales(number, name, first_scale, scaler._scale)
        if state.uncleared and (before_pass := state.uncleared.pop(identity, None)) is not None:
            own = state.passes.own.get(identity)
            if own is not None and (carried := own.carried):
                name = gradients.name
                state.evidence.record_uncleared(state.closed_steps + 1, name, before_pass, carried)
        if identity not in row.losses:  # an ascent's loss is the step's
            row.losses[identity] = losses
            if state.passes.kept.divisor != 1:
                row.divisors[identity] = state.passes.kept.accumulation(len(losses))
        gradients.steps += 1
        step = state.closed_steps + 1
        measured = state.before_clip.pop(identity, None) if state.before_clip else None
        if measured is None:
            counts: Counts | None = None
            first = state.first_clips
            before = first.take(gradients.parameters) if first.known else None
            if before:
                norms = gradients.spread([clip.norm for clip in before])
                for clip in before:
                    if clip.step is not None:
                        row.clips[id(clip.step)] = clip.step
                if (scale := before[0].scale) is not None:
                    state.evidence.record_scaled_clip(step, gradients.name, before[0].max_norm)
                present = (i for i, p in enumerate(gradients.parameters) if p.grad is not None)
                counts = {
                    i: clip.nonfinite
                    for i, clip in zip(present, before, strict=True)
                    if clip.nonfinite
                }
            if gradients.figure not in state.best_effort.lost:
                try:
                    factor = state.one if scale is None else scale
                    every = state.norms_every
                    is_due = every == 1 or (every and step % every == 0)
                    if norms is None and not is_due:
                        norms, factor = gradients.no_norms, gradients.unknown
                    elif norms is None:
                        norms = gradients.norms()
                    if norms and not counts and norms[0].is_cpu:
                        counts = self._nonfinite(row.scaler, gradients, norms)
                    if norms is not None:
                        measured = norms, factor, counts or None
                except Exception as error:
                    state.best_effort.lose(gradients.figure, error)
        if measured is not None:
            row.measured[identity] = measured
            if state.diagnoses:
                state.diagnoses.count(step, row, gradients, scale)
        if gradients.without_gradient:
            gradients.without_gradient = {
                i for i in gradients.without_gradient if gradients.parameters[i].grad is None
            }
        if gradients.without_gradient:
            own = state.passes.own.get(identity)
            has_changed = own is not None and own.has_changed
            state.best_effort(
                "missing gradients",
                partial(state.evidence.checks.check, has_changed=has_changed),
                step,
                gradients,
            )

    def _nonfinite(
        self, scaler: GradScaler | None, gradients: Gradients, norms: Sequence[Tensor]
    ) -> Counts | None:
        """Return the counts of nonfinite elements in host memory, if there are any."""
        state = self._state
        if scaler is not None:
            own = scaler._per_optimizer_states.get(id(gradients.optimizer), {})
            flags = own.get("found_inf_per_device")
            if flags:
                for flag in flags.values():
                    if flag.tolist():
                        return gradients.nonfinite(norms)
                return None
        elif self._rows.reader.has_nonfinite or (state.is_settled and len(state.known) == 1):
            return None  # the first ones were reported, or the row is written at once
        return None if all(map(math.isfinite, norms)) else gradients.nonfinite(norms)

    def measure_pending(self, row: CurrentStep) -> None:
        """Measure unscaled gradients that were not clipped as those of the step before."""
        state = self._state
        for identity in tuple(row.pending):
            row.pending.discard(identity)
            state.clipping.discard(identity)
            self.measure(row, state.known[identity].optimizer)


def number_on_host(tensor: Tensor) -> Value:
    """Return a number that the host can read without a wait, else the tensor."""
    value = value_on_host(tensor)
    return tensor if value is None else value
