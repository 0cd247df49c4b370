"""Conversion of ring rows to step records and scaler events.

row, fp32:  [loss, scale before, scale after, learning rate, found_inf ×O, total norm ×O,
             clipped norm ×O, own loss ×O if they are separate, norm of each gradient ×P]
            O optimizers, P parameters in the order of the optimizers, then of the modules;
            if the host writes rows, gradient norms are held outside the rows, in steps with layers
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from halfstep.monitor.layers import Layers
from halfstep.telemetry.events import (
    Culprit,
    Event,
    LayerNorms,
    Metric,
    NonfiniteGradients,
    Scaler,
    ScalerReplaced,
)
from halfstep.telemetry.flags import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    NOT_STEPPED,
    SKIPPED,
    UNKNOWN_LOSS,
    optimizer_skipped,
)
from halfstep.telemetry.spool import Steps

LOSS, SCALE, SCALE_AFTER, RATE, FOUND_INF = 0, 1, 2, 3, 4  # first columns
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_

#: By position of a parameter with a nonfinite norm: its numbers of inf and NaN elements.
Counts: TypeAlias = Mapping[int, tuple[int, int]]

REPLACED = 32  # replaced scalers reported one by one; after that only when the number doubles


@dataclass
class RowNotes:
    """Facts about a row that only the host has."""

    has_loss: bool = True
    is_stepped: bool = True  # the loop stepped an optimizer
    is_direct: bool = False  # stepped without its scaler: applied even if found_inf is set
    #: Positions of optimizers with an own loss, if the losses of several optimizers differ.
    own_losses: Sequence[int] = ()
    replaced: bool = False  # a new scaler, whose state was not restored
    is_continued: bool = False  # the scaler changed its scale since the previous row


class Rows:
    """Reader of rows in order, which remembers the scale after the last row."""

    def __init__(
        self,
        optimizers: Mapping[str, list[str]],
        *,
        max_grad_norm: float | None = None,
        layers_every: int = 0,
        has_rates: bool = False,
        has_own_losses: bool = False,
    ) -> None:
        """Create a reader for one row layout.

        optimizers: each optimizer's parameter names, in forward order.
        max_grad_norm: the limit that norms were clipped to, if rows hold no clipped norms.
        layers_every: steps between reported gradient norms; a GPU's rows always hold them.
        has_rates: rows hold the learning rate, which the host does not have.
        has_own_losses: rows hold the loss of each optimizer.
        """
        self._has_own_losses = has_own_losses
        self._notes: dict[int, RowNotes] = {}  # by row
        self._optimizers = optimizers
        self._max_grad_norm, self._has_rates = max_grad_norm, has_rates
        self._layers = Layers(name for names in optimizers.values() for name in names)
        self._layers_every = layers_every
        self._skip_flags = [SKIPPED | optimizer_skipped(i) for i in range(len(optimizers))]
        self._counts: dict[int, dict[str, Counts]] = {}  # by row
        self._norms: dict[int, Sequence[float]] = {}  # by row, if rows do not hold them
        self._scaler_of: dict[int, int] = {}  # by row, only for scalers other than the first
        self._last_scales: dict[int, np.float32] = {}  # by scaler, after its last row
        self.skipped = 0  # steps in which any optimizer was skipped
        self._replaced = self._raised = 0  # replaced scalers, and those replaced by a higher scale
        self._has_nonfinite = False  # a step without a scaler had a nonfinite norm

    @property
    def columns(self) -> int:
        """Number of values in a row."""
        return self.scalars + sum(map(len, self._optimizers.values()))

    @property
    def scalars(self) -> int:
        """Number of values in a row before the gradient norms."""
        return FOUND_INF + (3 + self._has_own_losses) * len(self._optimizers)

    @property
    def last_scale(self) -> float | None:
        """Scale after the last row, without a later change by hand."""
        scale = self._last_scales.get(0)
        return None if scale is None else float(scale)

    @last_scale.setter
    def last_scale(self, scale: float | None) -> None:
        self._last_scales = {} if scale is None else {0: np.float32(scale)}

    def relaid(
        self, optimizers: Mapping[str, list[str]], *, has_rates: bool, has_own_losses: bool
    ) -> "Rows":
        """Return a reader for a new set of optimizers, which keeps the counts and scales."""
        rows = Rows(
            optimizers,
            layers_every=self._layers_every,
            has_rates=has_rates,
            has_own_losses=has_own_losses,
        )
        rows._last_scales, rows.skipped = self._last_scales, self.skipped
        rows._replaced, rows._raised = self._replaced, self._raised
        rows._has_nonfinite = self._has_nonfinite
        return rows

    def is_for_layers(self, step: int) -> bool:
        """Return True if the gradient norms of this step are reported."""
        return self._layers_every > 0 and step % self._layers_every == 0

    def hold(self, row: int, norms: Sequence[float]) -> None:
        """Store the gradient norms of a row that does not hold them. row: its number."""
        self._norms[row] = norms

    def count(self, row: int, optimizer: str, counts: Counts) -> None:
        """Store the nonfinite counts of an optimizer's parameters. row: its number."""
        self._counts.setdefault(row, {})[optimizer] = counts

    def note(self, row: int) -> RowNotes:
        """Return a row's notes, changeable until it is read. row: its number."""
        return self._notes.setdefault(row, RowNotes())

    def belongs(self, row: int, scaler: int) -> None:
        """Assign a row to a scaler other than the first. row: its number."""
        self._scaler_of[row] = scaler

    def read(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Fill records from rows, and return the scaler's events. first: the first row's number."""
        count = len(self._optimizers)
        is_uneventful = self._is_uneventful(rows)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]  # (steps, O)
        clipped = rows[:, FOUND_INF + 2 * count : FOUND_INF + 3 * count]  # (steps, O)
        if self._max_grad_norm is not None:
            # inf × 0 is NaN here as it is on the device.
            with nullcontext() if is_uneventful else np.errstate(all="ignore"):
                clipped = _clip(totals, self._max_grad_norm)
        records["loss"], records["scale"] = rows[:, LOSS], rows[:, SCALE]
        records["grad_norm"], records["grad_norm_clipped"] = _joint(totals), _joint(clipped)
        if self._has_rates:
            records["lr"] = rows[:, RATE]
        events = self._layer_norms(first, rows, records)
        if not is_uneventful:
            events += self._events(first, rows, records)
        end = first + len(rows)
        if not is_uneventful:
            self._notes = {row: note for row, note in self._notes.items() if row >= end}
            self._counts = {row: counts for row, counts in self._counts.items() if row >= end}
            self._scaler_of = {row: i for row, i in self._scaler_of.items() if row >= end}
        return events

    def _layer_norms(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Return layer_norms events for those steps that are a multiple of layers_every."""
        every = self._layers_every
        squares: Mapping[int, Sequence[float] | NDArray[np.float64]]  # by index into rows
        if self._norms:
            due = [i for row in self._norms if (i := row - first) < len(rows)]
            squares = {i: [norm * norm for norm in self._norms.pop(first + i)] for i in due}
        # Steps only increase, so the first and the last show that usually none is due.
        elif every and (records[0]["step"] - 1) // every != records[-1]["step"] // every:
            due = np.flatnonzero(records["step"] % every == 0).tolist()
            squares = {i: np.square(rows[i, self.scalars :], dtype=np.float64) for i in due}
        else:
            return []
        return [
            LayerNorms(
                step=int(records["step"][i]),
                layers=self._layers.names,
                norms=[*self._layers.norms(row_squares)],
            )
            for i, row_squares in squares.items()
        ]

    def _is_uneventful(self, rows: NDArray[np.float32]) -> bool:
        """Return True if all is finite and the scale unchanged: the usual case, so cheap."""
        count = len(self._optimizers)
        scales = rows[:, SCALE : SCALE_AFTER + 1]
        found_inf = rows[:, FOUND_INF : FOUND_INF + count]
        return bool(
            not self._scaler_of
            and not self._notes
            and (scales == self._last_scales.get(0)).all()
            and not found_inf.any()
            and np.isfinite(rows[:, : FOUND_INF + 2 * count]).all()
        )

    def _events(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Set the records' flags, and return the scaler's events."""
        count = len(self._optimizers)
        found_inf = rows[:, FOUND_INF : FOUND_INF + count] != 0  # (steps, O)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]
        norms = rows[:, self.scalars :]  # (steps, P)

        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        notes = [self._notes.get(first + i, PLAIN) for i in range(len(rows))]
        overflows = (np.isinf(totals) & ~found_inf).any(axis=1)
        is_scalers = np.array([note.is_stepped and not note.is_direct for note in notes])
        skipped = found_inf & is_scalers[:, None]
        flags = np.bitwise_or.reduce(np.where(skipped, self._skip_flags, 0), axis=1)
        has_loss = np.array([note.has_loss for note in notes])
        flags |= np.where(np.isfinite(rows[:, LOSS]) | ~has_loss, 0, NONFINITE_LOSS)
        flags |= np.where(has_loss, 0, UNKNOWN_LOSS)
        flags |= np.where([note.is_stepped for note in notes], 0, NOT_STEPPED)
        records["flags"] = flags | np.where(overflows, NORM_OVERFLOW, 0)
        self.skipped += int(np.count_nonzero(flags & SKIPPED))

        before, after = rows[:, SCALE], rows[:, SCALE_AFTER]
        left = self._left(first, before, after)
        events: list[Event] = self._own(notes, rows, records)
        events += self._replacements(notes, rows, records, left)
        events += self._unscaled_culprits(first, rows, records, found_inf)
        replaced = np.array([note.replaced or note.is_continued for note in notes])
        for i in np.flatnonzero(found_inf.any(axis=1) | (left != before) | (before != after)):
            if left[i] != before[i] and not replaced[i]:
                events.append(_event("set", records[i], float(left[i]), float(before[i])))
            counts = self._counts.get(first + int(i), {})
            events += self._scaler_events(records[i], rows[i], found_inf[i], norms[i], counts)
        return events

    def _own(
        self, notes: Sequence[RowNotes], rows: NDArray[np.float32], records: Steps
    ) -> list[Event]:
        """Return each optimizer's own loss and norm as metrics, if the losses differ."""
        count, names = len(self._optimizers), list(self._optimizers)
        events: list[Event] = []
        for i, note in enumerate(notes):
            for position in note.own_losses:
                values = {
                    "loss": rows[i, FOUND_INF + 3 * count + position],
                    "grad_norm": rows[i, FOUND_INF + count + position],
                }
                events += [
                    Metric(
                        step=int(records["step"][i]),
                        name=f"{metric}/{names[position]}",
                        value=float(value),
                        elapsed_ms=int(records["elapsed_ms"][i]),
                    )
                    for metric, value in values.items()
                ]
        return events

    def _replacements(
        self,
        notes: Sequence[RowNotes],
        rows: NDArray[np.float32],
        records: Steps,
        left: NDArray[np.float32],
    ) -> list[Event]:
        """Report replaced scalers: the first REPLACED, then each doubling of their number."""
        events: list[Event] = []
        for i, note in enumerate(notes):
            if not note.replaced:
                continue
            before, after = float(left[i]), float(rows[i, SCALE])
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

    def _unscaled_culprits(
        self,
        first: int,
        rows: NDArray[np.float32],
        records: Steps,
        found_inf: NDArray[np.bool_],
    ) -> list[Event]:
        """Name the culprits of the first step without a scaler that has a nonfinite norm."""
        if self._has_nonfinite:
            return []
        count = len(self._optimizers)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]
        bad = ~np.isfinite(totals).all(axis=1) & ~found_inf.any(axis=1) & (rows[:, SCALE] == 1)
        if not bad.any():
            return []
        self._has_nonfinite = True
        i = int(np.flatnonzero(bad)[0])
        counts, norms, culprits = self._counts.get(first + i, {}), rows[i, self.scalars :], []
        for optimizer, names in self._optimizers.items():
            own, norms = norms[: len(names)], norms[len(names) :]
            if optimizer in counts or len(own):
                culprits += _culprits(names, own, counts.get(optimizer))
        step = int(records["step"][i])
        return [NonfiniteGradients(step=step, culprits=culprits)]

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

    def _scaler_events(
        self,
        record: np.void,
        row: NDArray[np.float32],
        found_inf: NDArray[np.bool_],
        norms: NDArray[np.float32],
        counts: Mapping[str, Counts],
    ) -> list[Event]:
        before, after = float(row[SCALE]), float(row[SCALE_AFTER])
        events: list[Event] = []
        first = 0
        for (optimizer, names), was_skipped in zip(
            self._optimizers.items(), found_inf, strict=True
        ):
            own = slice(first, first + len(names))
            first = own.stop
            if was_skipped:
                culprits = _culprits(names, norms[own], counts.get(optimizer))
                events.append(_event("skip", record, before, after, optimizer, culprits))
        if after != before:
            is_growth = after > before
            events.append(_event("growth" if is_growth else "backoff", record, before, after))
        return events


PLAIN = RowNotes()


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _culprits(names: list[str], norms: NDArray[np.float32], counts: Counts | None) -> list[Culprit]:
    """List parameters with nonfinite gradients, with inf and NaN counts if available."""
    if counts is None:
        return [Culprit(name=names[i]) for i in np.flatnonzero(~np.isfinite(norms))]
    # A gradient without inf or NaN is finite, only too large for a finite norm.
    return [
        Culprit(name=names[position], inf=inf, nan=nan)
        for position, (inf, nan) in counts.items()
        if inf or nan
    ]


def _event(
    kind: Literal["skip", "growth", "backoff", "set"],
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


def _clip(totals: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Return the norms after clip_grads_with_norm_, by its own formula."""
    coefficient = np.float32(limit) / (totals + np.float32(CLIP_EPSILON))
    clipped: NDArray[np.float32] = totals * np.minimum(coefficient, np.float32(1))
    return clipped


def _joint(norms: NDArray[np.float32]) -> NDArray[Any]:
    """Combine the optimizers' norms (steps, O) into one L2 norm over all, (steps,)."""
    if norms.shape[1] == 1:
        return norms[:, 0]
    joint: NDArray[Any] = np.sqrt(np.square(norms, dtype=np.float64).sum(axis=1))
    return joint
