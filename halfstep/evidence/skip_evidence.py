"""Skips of a watched loop, as they become known. This module imports torch."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from halfstep.evidence.buffer_evidence import BufferEvidence
from halfstep.evidence.input_evidence import InputEvidence, on_device
from halfstep.recording.gradients import Gradients
from halfstep.shadow.armed_steps import ArmedSteps
from halfstep.telemetry.events import Event, Scaler
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopies
from halfstep.watching.current_step import CurrentStep, Value

CLIPS_ON_DEVICE = 100  # whose norms are handed over, of a loop without a scaler


class SkipEvidence:
    """Arms steps after a skip, and reads buffers after a nonfinite loss.

    A loop without a scaler may skip the step of a nonfinite norm, which it learns by a clip.
    """

    def __init__(
        self,
        armed: ArmedSteps,
        inputs: InputEvidence,
        buffers: BufferEvidence,
        host_copies: HostCopies,
    ) -> None:
        self._host_copies = host_copies
        self._armed, self._inputs, self._buffers = armed, inputs, buffers
        self.in_a_row = 0  # consecutive skips known to the host
        self._has_skipped_loss = False
        self._bad_clip_at: int | None = None  # number of steps before a nonfinite clip
        self._is_lost = False  # a step was applied after it
        self._device_clips = 0  # handed over

    def is_for_clip(self, norm: Value) -> bool:
        """Return whether `record_clip` examines gradients of this norm."""
        if self._is_lost:
            return False
        if self._bad_clip_at is not None or self._armed.left or self._armed.is_armed:
            return True
        if isinstance(norm, float):
            return not math.isfinite(norm)
        return self._device_clips < CLIPS_ON_DEVICE

    def record_clip(self, steps: int, norm: Value, loss: Value, optimizer: Optimizer) -> None:
        """Record that gradients of a loop without a scaler are about to be clipped.

        steps: made so far. If the loop skips the step of a nonfinite norm, its weights are
        unchanged, and the next steps are armed as after a skip.
        """
        if self._is_lost:
            return
        if self._armed.is_armed:  # an armed step is read by the host anyway
            norm, loss = float(norm), float(loss)
        if isinstance(norm, float) and isinstance(loss, float):
            is_finite = math.isfinite(norm)
            self._judge_clip(steps, norm, loss)
            if not self._is_lost:
                self._armed.record_clip(optimizer, is_finite=is_finite)
        elif isinstance(norm, Tensor) and self._device_clips < CLIPS_ON_DEVICE:
            self._device_clips += 1
            both = torch.stack([norm.detach().float(), on_device(loss, norm.device)])
            self._host_copies.send(
                lambda arrived: self._judge_clip(steps, *arrived[0].tolist()), both
            )
        self._host_copies.report()

    def has_clipped(self, steps: int) -> None:
        """Arm the step after a clip with a nonfinite norm, which the loop may leave out."""
        if self._bad_clip_at is not None:
            self._armed.begin(steps + 1)

    def _judge_clip(self, steps: int, norm: float, loss: float) -> None:
        if self._bad_clip_at not in (None, steps):  # that step was applied: the weights are lost
            self._is_lost, self._bad_clip_at = True, None
            self._armed.stop()
            return
        self._bad_clip_at = None if math.isfinite(norm) else steps
        if not math.isfinite(norm):
            self._armed.record_skip(steps + 1, 0, 1, 1, loss_is_finite=math.isfinite(loss))

    def close(
        self,
        step: int,
        row: CurrentStep,
        known: Mapping[int, Gradients],
        found_inf: Mapping[int, Value],
        loss: Value,
    ) -> None:
        """Process a closed row of a scaler. On a CPU its flags are known now."""
        flags = list(found_inf.values())
        if any(isinstance(flag, float) for flag in flags):
            loss_is_finite = not isinstance(loss, float) or math.isfinite(loss)
            self._skip(step, row, known, any(flags), loss_is_finite=loss_is_finite)
        self._host_copies.report()

    def _skip(
        self,
        step: int,
        row: CurrentStep,
        known: Mapping[int, Gradients],
        was_skipped: bool,
        *,
        loss_is_finite: bool,
    ) -> None:
        if not was_skipped:
            self.in_a_row = 0
            self._armed.record_applied()
            return
        self.in_a_row += 1
        counted = [
            counts for measured in row.measured.values() if (counts := measured[2]) is not None
        ]
        nan = sum(nan > 0 for counts in counted for _inf, nan in counts.values())
        infinite = sum(nan == 0 < inf for counts in counted for inf, nan in counts.values())
        total = sum(len(known[key].names) for key in row.measured if key in known)
        self._armed.record_skip(step, infinite, nan, total, loss_is_finite=loss_is_finite)
        if not loss_is_finite:
            self._buffers.read(step)

    def receive(self, records: Steps, events: Sequence[Event], norms: NDArray[np.float32]) -> None:
        """Process skips in rows of a device."""
        skips = [skip for skip in events if isinstance(skip, Scaler) and skip.kind == "skip"]
        of_step = dict(zip(records["step"].tolist(), norms, strict=True))
        for event in skips:
            nan = int(np.isnan(of_step[event.step]).sum())
            infinite = int(np.isinf(of_step[event.step]).sum())
            loss_is_finite = not event.loss_nonfinite
            self.in_a_row += 1
            self._armed.record_skip(
                event.step, infinite, nan, norms.shape[1], loss_is_finite=loss_is_finite
            )
            self._has_skipped_loss |= not loss_is_finite
        if len(records) and not records["flags"][-1] & SKIPPED:
            self.in_a_row = 0
            self._armed.record_applied()
        if skips and self._has_skipped_loss:
            self._buffers.read(skips[0].step)
