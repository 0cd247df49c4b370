"""Precision diffs of a watched run's batches."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.session.stderr import say
from halfstep.session.step_numbers import BadArgument
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.watching.noop_watch import NoopWatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from halfstep.precision_lab.report import PrecisionReport
    from halfstep.watching.hooks import Hooks
    from halfstep.watching.loop import Loop

MOST_DIFFS = 100  # precision diffs that a run records


class PrecisionDiffs:
    """Precision diffs of the watched modules, of which the first ones are recorded."""

    def __init__(self, loop: "Loop", taps: "Hooks", spool: PatientSpool) -> None:
        self._loop, self._taps, self._spool = loop, taps, spool
        self._count = 0

    def make(
        self,
        closure: "Callable[[], Tensor]",
        dtype: "torch.dtype | None",
        scale: float | None,
        reference: "torch.dtype | None",
    ) -> "PrecisionReport":
        """Make a diff; arguments: those of `Watch.precision_diff`."""
        if isinstance(self._loop, NoopWatch) or not self._loop.modules:
            raise BadArgument("no module is watched; name the model: watch(model)")
        import torch

        from halfstep.precision_lab.diff import diff_of
        from halfstep.precision_lab.report import PrecisionReport

        loop, scaler = self._loop, self._loop.scaler
        dtype = dtype or (torch.float16 if scaler else torch.bfloat16)
        if scale is None and scaler is not None and dtype == torch.float16:
            scale = scaler.get_scale()
        reference = reference or torch.float32
        with self._taps.suspend():
            event = diff_of(loop.modules, closure, dtype, scale, reference, step=loop.step)
        if self._count < MOST_DIFFS:
            self._spool.event(event)
        elif self._count == MOST_DIFFS:
            say(f"{MOST_DIFFS} precision diffs are recorded; further ones are only returned")
        self._count += 1
        return PrecisionReport(event)
