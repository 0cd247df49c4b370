"""What the rows of a ring say: records of steps, and what the scaler did.

row, fp32:  [loss, scale before, scale after, learning rate, found_inf ×O, total norm ×O,
             clipped norm ×O, own loss ×O if they are separate, norm of each gradient ×P]
            O optimizers, P parameters in the order of the optimizers, then of the modules;
            where the host writes rows, it holds the norms of gradients beside them, if they are due
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from halfstep.monitor.layers import Layers
from halfstep.telemetry.spool import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    NOT_STEPPED,
    SKIPPED,
    UNKNOWN_LOSS,
    Event,
    Steps,
    optimizer_skipped,
)

LOSS, SCALE, SCALE_AFTER, RATE, FOUND_INF = 0, 1, 2, 3, 4  # columns; the others follow
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_

#: Of parameters with a norm that is not finite, by position: elements that are inf, and NaN.
Counts: TypeAlias = Mapping[int, tuple[int, int]]

REPLACED = 32  # scalers whose replacement is reported, each; more only as they double


@dataclass
class RowNotes:
    """What the host knows of a row and the row does not hold."""

    has_loss: bool = True
    is_stepped: bool = True  # the loop stepped an optimizer
    is_direct: bool = False  # it was stepped outside of its scaler: applied, whatever the flags say
    #: Optimizers with a loss of their own, by position, where those of several differ.
    own_losses: Sequence[int] = ()
    replaced: bool = False  # the scaler is another one, whose state was not restored
    is_continued: bool = False  # the scaler changed its scale since the row before


class Rows:
    """Reads rows in their order, and remembers the scale that the last one left."""

    def __init__(
        self,
        optimizers: Mapping[str, list[str]],
        *,
        max_grad_norm: float | None = None,
        layers_every: int = 0,
        has_rates: bool = False,
        has_own_losses: bool = False,
    ) -> None:
        """optimizers: the names of each one's parameters, in forward order.

        max_grad_norm: what the norms were clipped to, if rows say nothing of it.  layers_every:
        every how many steps the norms of gradients are told; a GPU's rows always hold them.
        has_rates: the learning rate is the row's, for the host does not know it.
        has_own_losses: a row holds the loss of each optimizer.
        """
        self._has_own_losses = has_own_losses
        self._notes: dict[int, RowNotes] = {}  # by row
        self._optimizers = optimizers
        self._max_grad_norm, self._has_rates = max_grad_norm, has_rates
        self._layers = Layers(name for names in optimizers.values() for name in names)
        self._layers_every = layers_every
        self._skip_flags = [SKIPPED | optimizer_skipped(i) for i in range(len(optimizers))]
        self._counts: dict[int, dict[str, Counts]] = {}  # by row
        self._norms: dict[int, Sequence[float]] = {}  # by row, where rows do not hold them
        self._scaler_of: dict[int, int] = {}  # by row, where it is not the first scaler's
        self._last_scales: dict[int, np.float32] = {}  # by scaler, after its last row
        self.skipped = 0  # steps in which any optimizer was skipped
        self._replaced = self._raised = 0  # scalers by others, and those with a higher scale
        self._has_nonfinite = False  # a step without a scaler was not finite

    @property
    def columns(self) -> int:
        """How many numbers a row has."""
        return self.scalars + sum(map(len, self._optimizers.values()))

    @property
    def scalars(self) -> int:
        """How many of them are not norms of gradients."""
        return FOUND_INF + (3 + self._has_own_losses) * len(self._optimizers)

    @property
    def last_scale(self) -> float | None:
        """What the last row left: a scale set since then is not told of, as yet."""
        scale = self._last_scales.get(0)
        return None if scale is None else float(scale)

    @last_scale.setter
    def last_scale(self, scale: float | None) -> None:
        self._last_scales = {} if scale is None else {0: np.float32(scale)}

    def relaid(
        self, optimizers: Mapping[str, list[str]], *, has_rates: bool, has_own_losses: bool
    ) -> "Rows":
        """Return what reads the rows of more optimizers, or of others, from here on."""
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
        """Tell whether the norms of this step's gradients are due."""
        return self._layers_every > 0 and step % self._layers_every == 0

    def hold(self, row: int, norms: Sequence[float]) -> None:
        """Have the norms that are due of a row that does not hold them. row: its number."""
        self._norms[row] = norms

    def count(self, row: int, optimizer: str, counts: Counts) -> None:
        """Have the culprits of a row counted. row: its number."""
        self._counts.setdefault(row, {})[optimizer] = counts

    def note(self, row: int) -> RowNotes:
        """Return a row's notes, to be changed until it is read. row: its number."""
        return self._notes.setdefault(row, RowNotes())

    def belongs(self, row: int, scaler: int) -> None:
        """Say whose scale a row holds, if not the first scaler's. row: its number."""
        self._scaler_of[row] = scaler

    def read(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Fill the records in from the rows, and say what the scaler did. first: a row's number."""
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
        read = first + len(rows)
        if not is_uneventful:
            self._notes = {row: each for row, each in self._notes.items() if row >= read}
            self._counts = {row: each for row, each in self._counts.items() if row >= read}
            self._scaler_of = {row: each for row, each in self._scaler_of.items() if row >= read}
        return events

    def _layer_norms(self, first: int, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Tell the norm of each layer's gradients, in the steps that are due."""
        every = self._layers_every
        squares: Mapping[int, Sequence[float] | NDArray[np.float64]]  # by place among the rows
        if self._norms:
            due = [i for row in self._norms if (i := row - first) < len(rows)]
            squares = {i: [norm * norm for norm in self._norms.pop(first + i)] for i in due}
        # Mostly none is due, as two numbers tell: steps only rise.
        elif every and (records[0]["step"] - 1) // every != records[-1]["step"] // every:
            due = np.flatnonzero(records["step"] % every == 0).tolist()
            squares = {i: np.square(rows[i, self.scalars :], dtype=np.float64) for i in due}
        else:
            return []
        names = {"event": "layer_norms", "layers": self._layers.names}
        return [
            names | {"step": int(records["step"][i]), "norms": self._layers.norms(each)}
            for i, each in squares.items()
        ]

    def _is_uneventful(self, rows: NDArray[np.float32]) -> bool:
        """Whether all is finite and the scale as it was: nearly always, so it has to be cheap."""
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
        """Flag the records, and list the scaler's events."""
        count = len(self._optimizers)
        found_inf = rows[:, FOUND_INF : FOUND_INF + count] != 0  # (steps, O)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]
        norms = rows[:, self.scalars :]  # (steps, P)

        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        notes = [self._notes.get(first + i, PLAIN) for i in range(len(rows))]
        overflows = (np.isinf(totals) & ~found_inf).any(axis=1)
        is_kept = np.array([each.is_stepped and not each.is_direct for each in notes])
        skipped = found_inf & is_kept[:, None]
        flags = np.bitwise_or.reduce(np.where(skipped, self._skip_flags, 0), axis=1)
        has_loss = np.array([each.has_loss for each in notes])
        flags |= np.where(np.isfinite(rows[:, LOSS]) | ~has_loss, 0, NONFINITE_LOSS)
        flags |= np.where(has_loss, 0, UNKNOWN_LOSS)
        flags |= np.where([each.is_stepped for each in notes], 0, NOT_STEPPED)
        records["flags"] = flags | np.where(overflows, NORM_OVERFLOW, 0)
        self.skipped += int(np.count_nonzero(flags & SKIPPED))

        before, after = rows[:, SCALE], rows[:, SCALE_AFTER]
        left = self._left(first, before, after)
        events: list[Event] = self._own(notes, rows, records)
        events += self._replacements(notes, rows, records, left)
        events += self._unscaled_culprits(first, rows, records, found_inf)
        replaced = np.array([each.replaced or each.is_continued for each in notes])
        for i in np.flatnonzero(found_inf.any(axis=1) | (left != before) | (before != after)):
            if left[i] != before[i] and not replaced[i]:
                events.append(_event("set", records[i], float(left[i]), float(before[i])))
            counts = self._counts.get(first + int(i), {})
            events += self._scaler_events(records[i], rows[i], found_inf[i], norms[i], counts)
        return events

    def _own(
        self, notes: Sequence[RowNotes], rows: NDArray[np.float32], records: Steps
    ) -> list[Event]:
        """Return each optimizer's own loss and norm as metrics, where they differ."""
        count, names = len(self._optimizers), list(self._optimizers)
        events: list[Event] = []
        for i, note in enumerate(notes):
            for place in note.own_losses:
                values = {
                    "loss": rows[i, FOUND_INF + 3 * count + place],
                    "grad_norm": rows[i, FOUND_INF + count + place],
                }
                events += [
                    {
                        "event": "metric",
                        "step": int(records["step"][i]),
                        "name": f"{metric}/{names[place]}",
                        "value": float(value),
                        "elapsed_ms": int(records["elapsed_ms"][i]),
                    }
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
        """Report replaced scalers: the first REPLACED one by one, then each time they doubled."""
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
                scales = {"scale_before": before, "scale_after": after}
                event = {"event": "scaler_replaced", "step": step, "count": self._replaced}
                events.append(event | scales)
        return events

    def _unscaled_culprits(
        self,
        first: int,
        rows: NDArray[np.float32],
        records: Steps,
        found_inf: NDArray[np.bool_],
    ) -> list[Event]:
        """Name the parameters of the first step without a scaler whose gradients are not finite."""
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
        return [{"event": "nonfinite", "kind": "nonfinite", "step": step, "culprits": culprits}]

    def _left(
        self, first: int, before: NDArray[np.float32], after: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the scale that the row before left, of the same scaler.

        One that is not what the row then had was set by hand in between.
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
        events, first = [], 0
        for (optimizer, names), was_skipped in zip(
            self._optimizers.items(), found_inf, strict=True
        ):
            own = slice(first, first + len(names))
            first = own.stop
            if was_skipped:
                culprits = _culprits(names, norms[own], counts.get(optimizer))
                skip = {"optimizer": optimizer, "culprits": culprits}
                events.append(_event("skip", record, before, after) | skip)
        if after != before:
            kind = "growth" if after > before else "backoff"
            events.append(_event(kind, record, before, after))
        return events


PLAIN = RowNotes()


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _culprits(
    names: list[str], norms: NDArray[np.float32], counts: Counts | None
) -> list[dict[str, Any]]:
    """Name the parameters whose gradients are not finite, counted where that was for free."""
    if counts is None:
        return [{"name": names[i]} for i in np.flatnonzero(~np.isfinite(norms))]
    # One without inf or NaN is finite, though too large for its norm to be.
    return [
        {"name": names[position], "inf": inf, "nan": nan}
        for position, (inf, nan) in counts.items()
        if inf or nan
    ]


def _event(kind: str, record: np.void, before: float, after: float) -> Event:
    return {
        "event": "scaler",
        "kind": kind,
        "step": int(record["step"]),
        "optimizer": None,
        "scale_before": before,
        "scale_after": after,
        "culprits": [],
        "loss_nonfinite": bool(record["flags"] & NONFINITE_LOSS),
    }


def _clip(totals: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Return what clip_grads_with_norm_ leaves of the norms, as it reckons."""
    coefficient = np.float32(limit) / (totals + np.float32(CLIP_EPSILON))
    clipped: NDArray[np.float32] = totals * np.minimum(coefficient, np.float32(1))
    return clipped


def _joint(norms: NDArray[np.float32]) -> NDArray[Any]:
    """Return one L2 norm over all optimizers, (steps,), of each one's, (steps, O)."""
    if norms.shape[1] == 1:
        return norms[:, 0]
    joint: NDArray[Any] = np.sqrt(np.square(norms, dtype=np.float64).sum(axis=1))
    return joint
