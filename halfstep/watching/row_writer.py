"""Rows of a watched loop, written by its recorder. This module imports torch."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from halfstep.number_formats import duration
from halfstep.recording.gradients import Gradients, parameter_names
from halfstep.recording.reader import Reader, ScalerRule
from halfstep.recording.recorder import OnSteps, Recorder
from halfstep.recording.ring import RING_ROWS
from halfstep.recording.row import LOSS, SCALE, Layout
from halfstep.watching.clip_columns import ClipColumns
from halfstep.watching.current_step import CurrentStep, Value
from halfstep.watching.known_optimizers import choose_name, forget, list_gone
from halfstep.watching.state import LoopState

RELAY_SECONDS = 30.0  # timeout for a device to finish its rows before a new row layout


class RowWriter:
    """Writes a row per step, and closes it."""

    def __init__(
        self, state: LoopState, started_at: float, layers_every: int | None, on_steps: OnSteps
    ) -> None:
        """started_at: origin of elapsed_ms, by halfstep.clock.  on_steps: receives arrived rows."""
        self._state, self._started_at, self._on_steps = state, started_at, on_steps
        self.reader = Reader(Layout({}), layers_every=layers_every)
        self.recorder: Recorder | None = None
        self.explicit: list[Value] = []  # losses of the open row that override the observed ones
        self.closed_row = state.unscaled  # the row that was closed last
        self._clips = ClipColumns(state.known)

    def meet(self, optimizer: Optimizer) -> Gradients:
        """Register a new or changed optimizer, and allocate its rows."""
        state = self._state
        state.start()
        known = state.known.get(id(optimizer))
        before = list(state.known)
        if known is None:
            for identity in list_gone(state):
                forget(state, identity, optimizer)
        name = choose_name(state, optimizer) if known is None else known.name
        if known is not None:  # a parameter was replaced
            state.names |= parameter_names(state.modules)
        gradients = Gradients(optimizer, name, state.names)
        if self._takes_place(optimizer, gradients, before):
            return gradients
        if not self.drain(RELAY_SECONDS):
            raise RuntimeError(
                f"the device has not finished its steps in {duration(RELAY_SECONDS)}"
            )
        self._know(optimizer, gradients)
        layout = Layout(
            {gradients.name: gradients.names for gradients in state.known.values()},
            has_rate=isinstance(gradients.rate(), Tensor),
            has_own_losses=len(state.known) > 1,
        )
        self.reader = self.reader.with_layout(layout)
        state.evidence.schedule.forget_rows()
        state.taking_part.clear()
        self.recorder = Recorder(
            self.reader, layout, gradients.device, self._started_at, self._on_steps
        )
        state.one = self.recorder.one
        self._clips = ClipColumns(state.known)
        return gradients

    def _know(self, optimizer: Optimizer, gradients: Gradients) -> None:
        state, identity = self._state, id(optimizer)
        if identity in state.known:
            state.passes.forget(identity)
        state.known[identity] = gradients
        state.best_effort(
            "optimizers", state.evidence.checks.meets, state.closed_steps + 1, gradients
        )

    def _takes_place(
        self, optimizer: Optimizer, gradients: Gradients, before: Sequence[int]
    ) -> bool:
        """Register an optimizer that changes no row's layout; return False if it does.

        It has other parameters now, or is made for each task. The device need not finish its rows.
        before: the ids of the optimizers of the layout, in its order.
        """
        state, recorder, identity = self._state, self.recorder, id(optimizer)
        if recorder is None or recorder.device != gradients.device:
            return False
        names = list(recorder.layout.optimizers)
        if recorder.layout.optimizers.get(gradients.name) != gradients.names:
            return False
        place = names.index(gradients.name)
        order = [*before[:place], identity, *before[place + 1 :]]
        has_rate = isinstance(gradients.rate(), Tensor)
        if has_rate != recorder.layout.has_rate or {*order} != {*state.known, identity}:
            return False
        self._know(optimizer, gradients)
        known = dict(state.known)
        state.known.clear()
        state.known.update((key, known[key]) for key in order)
        self._clips.forget()
        return True

    def close_of_gone(self) -> None:
        """Close the open row without a scaler if an optimizer that stepped in it is gone."""
        state = self._state
        if not state.unscaled.stepped.isdisjoint(list_gone(state)):
            clips, state.first_clips.known = state.first_clips.known, {}  # of the next row
            self.close_unscaled()
            state.first_clips.known = clips

    def drain(self, patience_seconds: float) -> bool:
        """Hand over all closed rows; return True if they arrived in time."""
        recorder = self.recorder
        if recorder is None:
            return True
        return recorder.drain(self.scale_of(self.closed_row), patience_seconds)

    def left_scale(self, count: int) -> float | None:
        """Return the scale that the newest of `count` closed rows has left, in another thread.

        None if it is on a device, or if the loop may be changing it.
        """
        row, recorder = self.closed_row, self.recorder
        scale = None if row.scaler is None else row.scaler._scale
        if recorder is None or scale is None or scale.device.type != "cpu":
            return None
        value, is_last = float(scale), (id(scale), scale._version) == row.version
        # In this order: an update fills found_inf, a close counts the step and then the row.
        is_last = is_last and not row.found_inf and row is self.closed_row
        is_last = is_last and recorder.ring.step_of(count - 1) == self._state.closed_steps
        return value if is_last and recorder.ring.number == count else None

    def scale_of(self, row: CurrentStep) -> Tensor:
        """Return a row's scale on the device, 1 without a scaler."""
        scale = None if row.scaler is None else row.scaler._scale
        return self._state.one if scale is None else scale

    def write(self, row: CurrentStep, scale: Tensor, scale_after: Tensor | None) -> None:
        """Write a row with one operator. scale_after: None if it is the next row's scale."""
        state = self._state
        recorder = self.recorder
        if recorder is None:
            return
        if row is not self.closed_row:
            recorder.set_scale_after(self.scale_of(self.closed_row))
        found_inf, factors, norms = [], [], []
        number, zero = recorder.ring.number, recorder.zero
        for identity, gradients in state.known.items():
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
                    self.reader.count(number, gradients.name, counts)
        clips = self._clips
        if row.clips or clips.has_clips:
            is_usual = clips.usual is not None and len(row.clips) == 1
            if is_usual and clips.usual is not None:  # inlined: each call adds to every step
                before, clipped = clips.usual
                [clip] = row.clips.values()
                is_usual = clip.max_norm == before.max_norm and clip.ids == before.ids
                is_usual = is_usual and clipped.optimizers <= row.measured.keys()
            if not is_usual:
                clips.note(number, row, self.reader)
        kept = state.passes.kept
        observed: Sequence[Tensor] = ()
        divisor = 1.0
        for identity, observed in row.losses.items():
            if observed:
                divisor = row.divisors.get(identity, 1.0) if row.divisors else 1.0
                break
        losses: Sequence[Value] = observed
        if kept.is_settled and len(kept.references) == 1:  # as `KeptLosses.get` does
            value, version, known = kept.references[0]
            if value.tolist() == known if known is not None else value._version == version:
                kept.references.clear()
        if kept.references or not kept.is_settled:
            losses = kept.get(observed)
        losses = self.explicit or losses
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
            others += [
                recorder.mean(row.losses.get(identity) or ()) * row.divisors[identity]
                if identity in row.divisors
                else recorder.mean(row.losses.get(identity) or ())
                for identity in state.known
            ]
        loss = losses[0] if len(losses) == 1 else math.nan
        if not isinstance(loss, Tensor):
            loss = recorder.mean(losses)
        if divisor != 1 and not self.explicit:
            loss = loss * divisor
        recorder.write(loss, scale, found_inf, factors, norms, others, scale_after)
        if row.scaler is None and recorder.ring.readable is not None:
            _count_nonfinite(recorder, self.reader, state.known, number, row)

    def _scale_was_set(self, row: CurrentStep, number: int) -> None:
        """Note that the loop has changed the scale since the last update."""
        recorder, scaler = self.recorder, row.scaler
        is_next = recorder is not None and row is self.closed_row
        if is_next and recorder is not None and scaler and not recorder.knows_scale_after:
            self.reader.note(number).set_after = ScalerRule(
                scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
            )

    def _note(self, number: int, row: CurrentStep, *, has_loss: bool) -> None:
        """Note the facts about a row that only the host has."""
        state = self._state
        row.is_special = False
        if not has_loss:
            self.reader.note(number).has_loss = False
        if row.is_continued:
            self.reader.note(number).is_continued, row.is_continued = True, False
        if row.has_replaced:
            self.reader.note(number).replaced, row.has_replaced = True, False
        if row.restored:
            self.reader.note(number).restored, row.restored = row.restored, ""
        if row.direct:
            self.reader.note(number).is_direct = True
        elif row.found_inf and not row.is_by_hand and not row.stepped >= row.found_inf.keys():
            self.reader.note(number).is_stepped = bool(row.stepped)
            state.best_effort("steps left out", state.evidence.not_stepped, state.closed_steps + 1)
        if len(row.losses) > 1 and not _are_one(list(row.losses.values())):
            known = list(state.known)
            own = [known.index(identity) for identity, losses in row.losses.items() if losses]
            self.reader.note(number).own_losses = own

    def close_unscaled(self) -> None:
        """Write and close the row of an iteration without a scaler."""
        state = self._state
        recorder = self.recorder
        if recorder is not None:
            self.write(state.unscaled, recorder.one, recorder.one)
            self.close(state.unscaled, recorder.one, state.ended)

    def close(self, row: CurrentStep, scale_after: Tensor, ended: float | None = None) -> None:
        """Close the written row, and start the next step's time. ended: None for now."""
        state = self._state
        recorder = self.recorder
        if recorder is None or state.step_started is None:
            return
        state.closed_steps += 1
        if state.first_clips.known:
            state.first_clips.forget()
        step, number = state.closed_steps, recorder.ring.number
        if len(row.measured) < len(state.known):
            state.taking_part[number] = [known in row.measured for known in state.known]
        if row.number:
            self.reader.belongs(number, row.number)
        ring = recorder.ring
        if state.diagnoses:
            rows = ring.readable
            scale = ring.row[SCALE] if rows is None else float(rows[number % RING_ROWS, SCALE])
            state.diagnoses.copy(step, row, scale)
        evidence, rows = state.evidence, ring.readable
        was_skipped = False
        if rows is not None:
            place = number % RING_ROWS
            for column in recorder.layout.flags:  # item() takes a tenth of any()
                was_skipped = was_skipped or rows.item(place, column) != 0
        if row.scaler is not None and (
            was_skipped
            or evidence.skips.in_a_row
            or evidence.host_copies.sent
            or evidence.inputs.found is not None
        ):
            state.best_effort("evidence", self._close_evidence, step, row)
        if evidence.armed.left or step >= evidence.armed.next_look:
            is_between = row.scaler is not None or state.is_settled
            begin = partial(evidence.armed.begin, is_between=is_between)
            state.best_effort("shadow steps", begin, step + 1)
        state.passes.is_over = True
        rate = row.rate if isinstance(row.rate, float) else 0.0
        if row.stepped:
            row.ascents = 0
        for by_id in row.of_step:
            by_id.clear()
        row.rate, row.is_by_hand = None, False
        if self.explicit:
            self.explicit = []
        self.closed_row = row
        if ended is None:
            ended = time.perf_counter()
        seconds, state.step_started = ended - state.step_started, ended
        until = ring.close(step, seconds, rate)
        if until is not None:
            recorder.send(until, scale_after)

    def _close_evidence(self, step: int, row: CurrentStep) -> None:
        """Pass on the flags, scale and loss of the written row."""
        state = self._state
        recorder = self.recorder
        if recorder is None:
            return
        ring = recorder.ring
        rows = ring.readable
        numbers = ring.row if rows is None else rows[ring.number % RING_ROWS].tolist()
        found_inf = [numbers[recorder.layout.found_inf.start + i] for i in range(len(state.known))]
        flags = dict(zip(state.known, found_inf, strict=True))
        own = {identity: flags[identity] for identity in row.found_inf}
        state.evidence.skips.close(step, row, state.known, own, numbers[LOSS])


def _are_one(losses: list[list[Tensor]]) -> bool:
    """Return True if all optimizers have the losses of the same backward passes."""
    first = losses[0]
    return all(
        len(other) == len(first) and all(a is b for a, b in zip(other, first, strict=True))
        for other in losses[1:]
    )


def _count_nonfinite(
    recorder: Recorder,
    reader: Reader,
    known: Mapping[int, Gradients],
    number: int,
    row: CurrentStep,
) -> None:
    """Count the nonfinite elements of a row without a scaler, which the host can read."""
    if recorder.ring.readable is None or reader.has_nonfinite:
        return
    values = recorder.ring.readable[number % RING_ROWS]
    if not math.isfinite(values[recorder.layout.norms].sum()):
        for identity, (norms, _factor, counts) in row.measured.items():
            if counts is None:
                gradients = known[identity]
                reader.count(number, gradients.name, gradients.nonfinite(norms))
