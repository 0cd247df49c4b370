"""Conversion of rows to step records and scaler events.

Rows may be read in another thread while the loop notes facts about later ones: the collections of
notes are changed in place, by operations that are atomic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from halfstep.recording.layers import Layers
from halfstep.recording.row import Clip, Layout, Rows, Values
from halfstep.telemetry.events import (
    Culprit,
    Event,
    LayerNorms,
    Metric,
    NonfiniteGradients,
    Scaler,
    ScalerLeftBehind,
    ScalerReplaced,
)
from halfstep.telemetry.flags import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    NOT_STEPPED,
    SKIPPED,
    UNKNOWN_LOSS,
    UNKNOWN_NORM,
    optimizer_skipped,
)
from halfstep.telemetry.spool import Steps

#: By position of a parameter with a nonfinite norm: its numbers of inf and NaN elements.
Counts: TypeAlias = Mapping[int, tuple[int, int]]

LAYERS_EVERY, LAYERS_DOUBLE_AT = 100, 10_000  # steps
SKIPS_SOON = 10  # steps: a scale that fits does not skip so soon
REPLACED = 32  # replaced scalers reported one by one; after that only when the number doubles


class ScalerRule(NamedTuple):
    """Parameters of torch's scaler."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int

    def scale_after(self, scale: np.float32, found_inf: bool, applied: int | None) -> np.float32:
        """Return the scale after a step. applied: steps before it since the last change."""
        if found_inf:
            return np.float32(float(scale) * self.backoff_factor)
        is_due = applied is not None and applied + 1 == self.growth_interval
        with np.errstate(over="ignore"):
            grown = np.float32(float(scale) * self.growth_factor)
        return grown if is_due and np.isfinite(grown) else scale


@dataclass
class RowNotes:
    """Facts about a row that only the host has."""

    has_loss: bool = True
    is_stepped: bool = True  # the loop stepped an optimizer
    is_direct: bool = False  # stepped without its scaler: applied even if found_inf is set
    #: Positions of optimizers with an own loss, if the losses of several optimizers differ.
    own_losses: Sequence[int] = ()
    replaced: bool = False  # a new scaler, whose state was not restored
    restored: str = ""  # an optimizer whose state was loaded, and that of this new scaler was not
    is_continued: bool = False  # the scaler changed its scale since the previous row
    #: Rule of the scaler, if its scale was set by hand after the previous row, and what that row
    #: had left is not recorded.
    set_after: ScalerRule | None = None


PLAIN = RowNotes()


class Reader:
    """Reader of rows in order, which remembers the scale after the last row."""

    def __init__(self, layout: Layout, *, layers_every: int | None = 0) -> None:
        """layers_every: steps between reported gradient norms of layers, 0 for none.

        None: LAYERS_EVERY, and ever more, so that a long run has no more than some hundreds.
        """
        self._layout, self._layers_every = layout, layers_every
        self._notes: dict[int, RowNotes] = {}  # by row
        self._names = list(layout.optimizers)
        self._layers = Layers(name for names in layout.optimizers.values() for name in names)
        self._skip_flags = [SKIPPED | optimizer_skipped(i) for i in range(len(self._names))]
        self._counts: dict[int, dict[str, Counts]] = {}  # by row
        #: Clips of a row and of those after it.
        self._clips: list[tuple[int, Sequence[Clip]]] = []
        self._scaler_of: dict[int, int] = {}  # by row, only for scalers other than the first
        self._last_scales: dict[int, np.float32] = {}  # by scaler, after its last row
        self.skipped = 0  # steps in which any optimizer was skipped
        #: Applied steps of the first scaler since its scale last changed; None if unknown.
        self.applied: int | None = None
        self._replaced = self._raised = 0  # replaced scalers, and those replaced by a higher scale
        #: Of a new scaler whose state was not loaded with that of its optimizer: that, step, scale.
        self._left_behind: tuple[str, int, float] | None = None
        self.has_nonfinite = False  # a step without a scaler had a nonfinite norm

    @property
    def last_scale(self) -> float | None:
        """Scale after the last row, without a later change by hand."""
        scale = self._last_scales.get(0)
        return None if scale is None else float(scale)

    @last_scale.setter
    def last_scale(self, scale: float | None) -> None:
        self._last_scales = {} if scale is None else {0: np.float32(scale)}

    def with_layout(self, layout: Layout) -> "Reader":
        """Return a reader for another layout, which keeps the counts and scales."""
        reader = Reader(layout, layers_every=self._layers_every)
        reader._last_scales, reader.skipped = self._last_scales, self.skipped
        reader._replaced, reader._raised = self._replaced, self._raised
        reader._left_behind = self._left_behind
        reader.has_nonfinite, reader.applied = self.has_nonfinite, self.applied
        return reader

    def count(self, row: int, optimizer: str, counts: Counts) -> None:
        """Store the nonfinite counts of an optimizer's parameters. row: its number."""
        self._counts.setdefault(row, {})[optimizer] = counts

    def clips(self, row: int, clips: Sequence[Clip]) -> None:
        """Store the clips of a row, which usually are those of the row before. row: its number."""
        if clips != (self._clips[-1][1] if self._clips else []):
            self._clips.append((row, clips))

    def note(self, row: int) -> RowNotes:
        """Return a row's notes, changeable until it is read. row: its number."""
        return self._notes.setdefault(row, RowNotes())

    def belongs(self, row: int, scaler: int) -> None:
        """Assign a row to a scaler other than the first. row: its number."""
        self._scaler_of[row] = scaler

    def read(self, first: int, rows: Rows, records: Steps) -> list[Event]:
        """Fill records from rows, and return the scaler's events. first: the first row's number."""
        values = Values(self._layout, rows)
        if self._clips:
            self._clip(first, rows, values)
        records["loss"], records["scale"] = values.loss, values.scale
        records["grad_norm"] = _joint(values.totals)
        records["grad_norm_clipped"] = _joint(values.clipped)
        if self._layout.has_rate:
            records["lr"] = rows[:, self._layout.rate.start]
        events = self._layer_norms(rows, records)
        if not values.has_norms.all():
            records["flags"] = np.where(values.has_norms, 0, UNKNOWN_NORM)
        if self._is_uneventful(values):
            if self.applied is not None:
                self.applied += len(rows)
            return events
        events += self._events(first, rows, values, records)
        end = first + len(rows)
        for facts in (self._notes, self._counts, self._scaler_of):
            for row in [row for row in list(facts) if row < end]:
                facts.pop(row, None)
        return events

    def _clip(self, first: int, rows: Rows, values: Values) -> None:
        """Apply the stored clips to the norms of rows."""
        after, stored = first + len(rows), list(self._clips)
        ends = [start for start, _ in stored[1:]]
        for (start, clips), end in zip(stored, [*ends, after], strict=True):
            span = slice(max(start - first, 0), max(min(end, after) - first, 0))
            if clips and span.start < span.stop:
                values.clip(self._layout, rows, span, clips)
        del self._clips[: sum(end <= after for end in ends)]

    def _layer_norms(self, rows: Rows, records: Steps) -> list[Event]:
        """Return layer_norms events for those steps that are a multiple of layers_every."""
        every = LAYERS_EVERY if self._layers_every is None else self._layers_every
        # Steps only increase, so the first and the last show that usually none is due.
        if not every or (records[0]["step"] - 1) // every == records[-1]["step"] // every:
            return []
        if self._layers_every is None:
            every <<= np.frexp(records["step"] // LAYERS_DOUBLE_AT)[1]  # doubled by each doubling
        layout = self._layout
        is_known = ~np.isnan(rows[:, layout.factors]).any(axis=1)
        due = np.flatnonzero((records["step"] % every == 0) & is_known)
        counts = [len(names) for names in layout.optimizers.values()]
        factors = np.repeat(rows[due, layout.factors].astype(np.float64), counts, axis=1)
        with np.errstate(all="ignore"):
            squares = np.square(rows[due, layout.norms] / np.where(factors, factors, 1))
        return [
            LayerNorms(
                step=int(records["step"][i]),
                layers=self._layers.names,
                norms=[*self._layers.norms(row_squares)],
            )
            for i, row_squares in zip(due, squares, strict=True)
        ]

    def _is_uneventful(self, values: Values) -> bool:
        """Return True if all is finite and the scale unchanged: the usual case, so cheap."""
        last = self._last_scales.get(0)
        return bool(
            not self._scaler_of
            and not self._notes
            and (values.scale == last).all()
            and values.scale_after[-1] == last
            and not values.found_inf.any()
            and np.isfinite(values.loss).all()
            and np.isfinite(values.totals[values.has_norms]).all()
        )

    def _events(self, first: int, rows: Rows, values: Values, records: Steps) -> list[Event]:
        """Set the records' flags, and return the scaler's events."""
        found_inf = values.found_inf
        norms = self._layout.norms_of(rows)

        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        notes = [self._notes.get(first + i, PLAIN) for i in range(len(rows))]
        overflows = (np.isinf(values.totals) & ~found_inf).any(axis=1)
        is_scalers = np.array([note.is_stepped and not note.is_direct for note in notes])
        skipped = found_inf & is_scalers[:, None]
        flags = np.bitwise_or.reduce(np.where(skipped, self._skip_flags, 0), axis=1)
        has_loss = np.array([note.has_loss for note in notes])
        flags |= np.where(np.isfinite(values.loss) | ~has_loss, 0, NONFINITE_LOSS)
        flags |= np.where(has_loss, 0, UNKNOWN_LOSS)
        flags |= np.where([note.is_stepped for note in notes], 0, NOT_STEPPED)
        records["flags"] |= (flags | np.where(overflows, NORM_OVERFLOW, 0)).astype(np.uint32)
        self.skipped += int(np.count_nonzero(flags & SKIPPED))

        before, after = values.scale, self._after(first, values, notes)
        left = self._left(first, before, after)
        events: list[Event] = self._find_own(notes, rows, values, records)
        events += self._replacements(notes, values, records, left)
        events += self._find_left_behind(notes, values, records)
        events += self._find_unscaled_culprits(first, norms, values, records)
        replaced = np.array([note.replaced or note.is_continued for note in notes])
        for i in np.flatnonzero(found_inf.any(axis=1) | (left != before) | (before != after)):
            record, scales = records[i], (float(before[i]), float(after[i]))
            if left[i] != before[i] and not replaced[i]:
                events.append(_event("set", record, float(left[i]), scales[0]))
            counts = self._counts.get(first + int(i), {})
            for optimizer, was_skipped in zip(self._names, found_inf[i], strict=True):
                if was_skipped:
                    culprits = _culprits(
                        self._layout.optimizers[optimizer],
                        norms[optimizer][i],
                        counts.get(optimizer),
                    )
                    events.append(_event("skip", record, *scales, optimizer, culprits))
            if scales[0] != scales[1]:
                kind: Kind = "growth" if scales[1] > scales[0] else "backoff"
                events.append(_event(kind, record, *scales))
        return events

    def _after(self, first: int, values: Values, notes: Sequence[RowNotes]) -> NDArray[np.float32]:
        """Return the scale after each row, and count the applied steps since it last changed.

        Where it was set by hand before the next row, it is what the scaler's rule makes of it.
        """
        after, before, found_inf = values.scale_after, values.scale, values.found_inf.any(axis=1)
        if np.isnan(after[-1]):
            after[-1] = before[-1]
        following = [*notes[1:], self._notes.get(first + len(notes), PLAIN)]
        for i, note in enumerate(following):
            if note.set_after:
                applied = self._count_applied_after((found_inf | (after != before))[:i])
                after[i] = note.set_after.scale_after(before[i], bool(found_inf[i]), applied)
        self.applied = self._count_applied_after(found_inf | (after != before))
        return after

    def _count_applied_after(self, has_changed: NDArray[np.bool_]) -> int | None:
        """Return the applied steps since the scale's last change. has_changed: by row."""
        (changes,) = has_changed.nonzero()
        if len(changes):
            return len(has_changed) - 1 - int(changes[-1])
        return None if self.applied is None else self.applied + len(has_changed)

    def _find_own(
        self, notes: Sequence[RowNotes], rows: Rows, values: Values, records: Steps
    ) -> list[Event]:
        """Return each optimizer's own loss and norm as metrics, if the losses differ."""
        events: list[Event] = []
        for i, note in enumerate(notes):
            for position in note.own_losses:
                own = {
                    "loss": rows[i, self._layout.own_losses][position],
                    "grad_norm": values.totals[i, position],
                }
                events += [
                    Metric(
                        step=int(records["step"][i]),
                        name=f"{metric}/{self._names[position]}",
                        value=float(value),
                        elapsed_ms=int(records["elapsed_ms"][i]),
                    )
                    for metric, value in own.items()
                ]
        return events

    def _replacements(
        self,
        notes: Sequence[RowNotes],
        values: Values,
        records: Steps,
        left: NDArray[np.float32],
    ) -> list[Event]:
        """Report replaced scalers: the first REPLACED, then each doubling of their number."""
        events: list[Event] = []
        for i, note in enumerate(notes):
            if not note.replaced:
                continue
            before, after = float(left[i]), float(values.scale[i])
            self._replaced += 1
            self._raised += after > before
            is_due = self._replaced <= REPLACED or _is_power_of_two(self._replaced)
            if is_due or (after > before and _is_power_of_two(self._raised)):
                step = int(records["step"][i])
                count = self._replaced
                events.append(
                    ScalerReplaced(step=step, scale_before=before, scale_after=after, count=count)
                )
        return events

    def _find_left_behind(
        self, notes: Sequence[RowNotes], values: Values, records: Steps
    ) -> list[Event]:
        """Report a scaler that was not restored with its optimizer, if it then skips a step."""
        for i, note in enumerate(notes):
            step = int(records["step"][i])
            if note.restored:
                self._left_behind = note.restored, step, float(values.scale[i])
            if self._left_behind is not None and records["flags"][i] & SKIPPED:
                (optimizer, first, scale), self._left_behind = self._left_behind, None
                if step - first < SKIPS_SOON:
                    return [
                        ScalerLeftBehind(step=first, optimizer=optimizer, scale=scale, skipped=step)
                    ]
        return []

    def _find_unscaled_culprits(
        self, first: int, norms: Mapping[str, Rows], values: Values, records: Steps
    ) -> list[Event]:
        """Name the culprits of the first step without a scaler that has a nonfinite norm."""
        if self.has_nonfinite:
            return []
        bad = ~np.isfinite(values.totals).all(axis=1) & values.has_norms
        bad &= ~values.found_inf.any(axis=1) & (values.scale == 1)
        if not bad.any():
            return []
        self.has_nonfinite = True
        i = int(np.flatnonzero(bad)[0])
        counts = self._counts.get(first + i, {})
        culprits = [
            culprit
            for optimizer, names in self._layout.optimizers.items()
            for culprit in _culprits(names, norms[optimizer][i], counts.get(optimizer))
        ]
        return [NonfiniteGradients(step=int(records["step"][i]), culprits=culprits)]

    def _left(
        self, first: int, before: NDArray[np.float32], after: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return, for each row, the scale after the same scaler's previous row.

        If it differs from the row's scale before, the scale was set by hand in between.
        """
        left = np.empty_like(before)
        if not self._scaler_of:
            left[0], left[1:] = self._last_scales.get(0, before[0]), after[:-1]
            self._last_scales[0] = after[-1]
            return left
        scalers = np.array([self._scaler_of.get(first + i, 0) for i in range(len(before))])
        for scaler in {0, *self._scaler_of.values()} & set(scalers.tolist()):
            own = np.flatnonzero(scalers == scaler)
            left[own[1:]] = after[own[:-1]]
            left[own[0]] = self._last_scales.get(scaler, before[own[0]])
            self._last_scales[scaler] = after[own[-1]]
        return left


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _culprits(names: list[str], norms: NDArray[np.float32], counts: Counts | None) -> list[Culprit]:
    """List parameters with nonfinite gradients, with inf and NaN counts if available."""
    culprits: list[Culprit] = []
    for position in np.flatnonzero(~np.isfinite(norms)).tolist():
        inf, nan = (counts or {}).get(position, (UNSET, UNSET))
        # A gradient without inf or NaN is finite, only too large for a finite norm.
        if inf or nan or inf is UNSET:
            culprits.append(Culprit(name=names[position], inf=inf, nan=nan))
    return culprits


Kind: TypeAlias = Literal["skip", "growth", "backoff", "set"]


def _event(
    kind: Kind,
    record: np.void,
    before: float,
    after: float,
    optimizer: str | None = None,
    culprits: Sequence[Culprit] = (),
) -> Scaler:
    return Scaler(
        kind=kind,
        step=int(record["step"]),
        optimizer=optimizer,
        scale_before=before,
        scale_after=after,
        culprits=list(culprits),
        loss_nonfinite=bool(record["flags"] & NONFINITE_LOSS),
    )


def _joint(norms: Rows) -> NDArray[np.floating]:
    """Combine the optimizers' norms (steps, O) into one L2 norm over all, (steps,)."""
    if norms.shape[1] == 1:
        return norms[:, 0]
    joint: NDArray[np.floating] = np.sqrt(np.square(norms, dtype=np.float64).sum(axis=1))
    return joint
