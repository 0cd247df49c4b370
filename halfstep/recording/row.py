"""Layout of a step's row, and its values once it is on the host.

row, fp32:  [loss, scale, scale after, found_inf ×O, factor ×O, norm of each gradient ×P,
             learning rate, own loss ×O, clipped norm ×O]
            O optimizers, P parameters in the order of the optimizers, then of the modules;
            the last three only if a layout has them

scale after: NaN if it is the next row's scale.
factor: what the norms still include, the loss scale or 1; NaN if the norms were not taken.
The host does all arithmetic: totals, the division by the factor, and the clipped norm.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

LOSS, SCALE, SCALE_AFTER, FOUND_INF = range(4)  # first columns
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_

Rows: TypeAlias = NDArray[np.float32]  # (N, columns)


class Layout:
    """Columns of a row."""

    def __init__(
        self,
        optimizers: Mapping[str, list[str]],
        *,
        has_rate: bool = False,
        has_own_losses: bool = False,
        has_clipped: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        """Assign the columns.

        optimizers: each one's parameter names, in forward order.
        has_rate: rows hold the learning rate, which the host does not have.
        has_own_losses: rows hold the loss of each optimizer.
        has_clipped: rows hold norms after a clip; otherwise max_grad_norm determines them, if any.
        """
        self.optimizers = optimizers
        self.has_rate, self.has_own_losses = has_rate, has_own_losses
        self.has_clipped, self.max_grad_norm = has_clipped, max_grad_norm
        count, parameters = len(optimizers), sum(map(len, optimizers.values()))
        self.found_inf = slice(FOUND_INF, FOUND_INF + count)
        self.flags = range(FOUND_INF, FOUND_INF + count)  # the same columns
        self.factors = _following(self.found_inf, count)
        self.norms = _following(self.factors, parameters)
        self.rate = _following(self.norms, has_rate)
        self.own_losses = _following(self.rate, count * has_own_losses)
        self.clipped = _following(self.own_losses, count * has_clipped)
        self.columns: int = self.clipped.stop  # number of values in a row

    def norms_of(self, rows: Rows) -> Mapping[str, Rows]:
        """Return the norms of each optimizer's gradients, (N, P) with their factor."""
        first, norms = self.norms.start, {}
        for name, parameters in self.optimizers.items():
            norms[name] = rows[:, first : (first := first + len(parameters))]
        return norms


def _following(columns: slice, count: int) -> slice:
    return slice(columns.stop, columns.stop + count)


class Clip(NamedTuple):
    """A clip of gradients by the L2 norm over all of them."""

    columns: list[int]  # of their norms, from the layout's first
    max_norm: float


class Values:
    """Values of N rows of a layout, in fp32 unless stated otherwise."""

    def __init__(self, layout: Layout, rows: Rows) -> None:
        self.loss, self.scale = rows[:, LOSS], rows[:, SCALE]  # (N,)
        self.found_inf = rows[:, layout.found_inf] != 0  # (N, O)
        self.has_norms = ~np.isnan(rows[:, layout.factors]).any(axis=1)  # (N,)
        #: (N,): NaN in a last row whose scale after is unknown.
        self.scale_after = rows[:, SCALE_AFTER].copy()
        is_next = np.isnan(self.scale_after[:-1])
        self.scale_after[:-1][is_next] = self.scale[1:][is_next]
        with np.errstate(all="ignore"):  # a value may be inf or NaN, or exceed fp32
            totals = [
                np.sqrt(np.einsum("np,np->n", norms, norms, dtype=np.float64))
                for norms in layout.norms_of(rows).values()
            ]
            unscaled = np.stack(totals, axis=1) / rows[:, layout.factors]
            #: (N, O): L2 norm of unscaled gradients, NaN if it was not taken.
            self.totals = unscaled.astype(np.float32)
            self.clipped = self._compute_clipped(layout, rows)  # (N, O): the same after the clip

    def clip(self, layout: Layout, rows: Rows, span: slice, clips: Sequence[Clip]) -> None:
        """Compute the norms after clips, which follow each other, of a span of the rows."""
        norms = rows[span, layout.norms].astype(np.float64)
        is_clipped = np.zeros(len(norms), bool)
        with np.errstate(all="ignore"):
            for columns, max_norm in clips:
                totals = np.sqrt(np.square(norms[:, columns]).sum(axis=1))
                coefficient = max_norm / (totals + CLIP_EPSILON)
                is_clipped |= ~(coefficient >= 1)
                norms[:, columns] *= np.minimum(coefficient, 1)[:, None]
            counts = [len(names) for names in layout.optimizers.values()]
            own = np.split(norms, np.cumsum(counts)[:-1], axis=1)
            totals = np.stack([np.sqrt(np.square(norms).sum(axis=1)) for norms in own], axis=1)
            clipped = (totals / rows[span, layout.factors]).astype(np.float32)
        if self.clipped is self.totals:
            self.clipped = self.totals.copy()
        self.clipped[span] = np.where(is_clipped[:, None], clipped, self.clipped[span])

    def _compute_clipped(self, layout: Layout, rows: Rows) -> Rows:
        if layout.has_clipped:
            return rows[:, layout.clipped]
        if layout.max_grad_norm is None:
            return self.totals
        # By the formula of clip_grads_with_norm_: inf × 0 is NaN, as it is on the device.
        coefficient = np.float32(layout.max_grad_norm) / (self.totals + np.float32(CLIP_EPSILON))
        clipped: Rows = self.totals * np.minimum(coefficient, np.float32(1))
        return clipped
