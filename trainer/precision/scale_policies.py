"""Loss-scale policies beyond PyTorch's scaler: bounds, hysteresis, and stopping.

`ScaleRule` decides on the device, with tensors: the host never waits to learn of a skip.
`StopRule` decides on the host, from telemetry records that arrive some steps later.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.config_groups import LARGEST_SCALE, SMALLEST_SCALE, Scaler
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from trainer.observers import Observer

#: Powers of two by which a scale is kept above the smallest one between two checks.
BITS_TO_SPARE = 20
#: Consecutive applied steps after which the initial calibration of the scale is over. (Until then,
#: a scale that starts too high is halved in almost every step.)
CALIBRATED_AFTER = 25


class RuleError(RuntimeError):
    """A configured rule has ended the run: not a failure of code or machine."""


class ScaleUnusableError(RuleError):
    """The loss scale is unusable; the message has the rule and the step."""


class ScaleRule:
    """Update rule of the scale; with default settings exactly PyTorch's.

    Hysteresis, as in DeepSpeed and Megatron: number of skips until the scale backs off, reset when
    it grows. Tolerance, as in fairseq: the scale backs off only if the share of skipped steps since
    its last change has reached this. Either may delay a back-off; floor and ceiling are applied
    last.
    """

    def __init__(self, settings: Scaler, device: torch.device) -> None:
        self._hysteresis, self._tolerance = settings.hysteresis, settings.tolerance
        # At a scale of 0, or one with an infinite reciprocal, torch finds no inf in gradients of 0,
        # unscales them to NaN, and applies the step.
        self._floor = settings.floor or SMALLEST_SCALE
        self._ceiling = settings.ceiling or LARGEST_SCALE
        self._every = 1  # steps between two applications of the bounds
        if settings.floor is None and settings.ceiling is None:
            # Far from any useful scale: rarely, and so early that no back-offs lead beyond.
            self._every = max(1, min(16, int(BITS_TO_SPARE / -math.log2(settings.backoff_factor))))
            self._floor /= settings.backoff_factor**self._every
        self._steps_to_bounds = 1
        self._is_patient = settings.hysteresis > 1 or settings.tolerance > 0
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # 0-dim int64 on the device: skips left, and steps and skips since the scale last changed.
        self._patience = torch.full((), settings.hysteresis, dtype=torch.int64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._skips = torch.zeros((), dtype=torch.int64, device=device)

    def scale(self, scaler: GradScaler) -> Tensor:
        """Return the scale on the device, 0-dim, which each update changes in place.

        It is 1 without loss scaling. The scaler creates it with the first loss.
        """
        scale = scaler._scale if scaler.is_enabled() else None
        return self._one if scale is None else scale

    def update(self, scaler: GradScaler, found_inf: list[Tensor]) -> None:
        """Update the scale once per step, after all optimizers.

        found_inf: one per optimizer, 0-dim, on the device.
        """
        if not scaler.is_enabled():
            return
        scale = self.scale(scaler)
        before = scale.clone() if self._is_patient else None
        scaler.update()
        if before is not None:
            # With a tensor, update() copies on the device; the growth tracker stays as it is.
            scaler.update(self._held_back(before, scale, found_inf))
        self._steps_to_bounds -= 1
        if self._steps_to_bounds == 0:
            self._steps_to_bounds = self._every
            scale.clamp_(self._floor, self._ceiling)

    def set(self, scaler: GradScaler, scale: float) -> None:
        """Set the scale, within the bounds; ignore an invalid one.

        `GradScaler.update` needs a float: an int has no `requires_grad`.
        """
        if scaler.is_enabled() and SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            scaler.update(float(min(max(scale, self._floor), self._ceiling)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counters; without them a resumed run would back off at another step."""
        return {"patience": self._patience, "steps": self._steps, "skips": self._skips}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the counters; patience is limited to the current hysteresis."""
        for name, counter in self.state_dict().items():
            counter.copy_(state[name])
        self._patience.clamp_(max=self._hysteresis)

    def _held_back(self, before: Tensor, after: Tensor, found_inf: list[Tensor]) -> Tensor:
        """Count the step; return the scale after hysteresis and tolerance, before the bounds."""
        skipped = torch.stack(found_inf).amax().to(torch.int64)  # 0 or 1
        self._steps += 1
        self._skips += skipped
        self._patience -= skipped
        is_patient = self._patience > 0
        is_tolerable = self._skips < self._tolerance * self._steps
        after = torch.where((skipped == 1) & (is_patient | is_tolerable), before, after)

        has_grown = after > before  # before the ceiling, where it grows forever
        self._patience.masked_fill_(has_grown, self._hysteresis)
        for counter in (self._steps, self._skips):
            counter.masked_fill_(after != before, 0)
        return after


class Calibration:
    """Whether the initial calibration of the scale is over, as far as the host knows."""

    def __init__(self) -> None:
        self.is_over = False
        self.skipped_in_a_row = 0
        self._applied_in_a_row = 0

    def count(self, was_skipped: bool) -> None:
        """Count one step."""
        self._applied_in_a_row = 0 if was_skipped else self._applied_in_a_row + 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0
        self.is_over = self.is_over or self._applied_in_a_row >= CALIBRATED_AFTER

    def state_dict(self) -> dict[str, int]:
        """Return the state that a resumed run needs to continue the calibration."""
        return {
            "is_over": int(self.is_over),
            "applied_in_a_row": self._applied_in_a_row,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state."""
        self.is_over = bool(state["is_over"])
        self._applied_in_a_row = state["applied_in_a_row"]
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)


class StopRule(Observer):
    """Ends a run with an unusable scale; decides at drain, some steps late, at no cost."""

    def __init__(self, settings: Scaler) -> None:
        self._settings = settings
        self._calibration = Calibration()
        self._skips_in_a_row = 0
        self._reason: str | None = None

    def receive(self, records: Steps) -> None:
        """Process the steps that have arrived, in order."""
        for record, flags in zip(records, records["flags"].tolist(), strict=True):
            was_skipped = bool(flags & SKIPPED)
            self._calibration.count(was_skipped)
            self._skips_in_a_row = self._skips_in_a_row + 1 if was_skipped else 0
            if was_skipped and self._reason is None:
                self._reason = self._broken_rule(int(record["step"]), float(record["scale"]))

    def check(self) -> None:
        """Raise ScaleUnusableError if a rule was broken."""
        if self._reason:
            raise ScaleUnusableError(self._reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; without them a resumed run would stop later."""
        calibration = self._calibration.state_dict()
        return {"calibration": calibration, "skips_in_a_row": self._skips_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        self._calibration.load_state_dict(state["calibration"])
        self._skips_in_a_row = state["skips_in_a_row"]

    def _broken_rule(self, step: int, scale: float) -> str | None:
        most, floor = self._settings.stop_after_skips, self._settings.floor
        if most and self._calibration.is_over and self._skips_in_a_row >= most:
            return (
                f"step {step:,} was skipped, the last of {self._skips_in_a_row} in a row, and "
                f"scaler.stop_after_skips is {most}; the loss scale was {scale_text(scale)}"
            )
        if self._settings.stop_at_floor and floor is not None and scale <= floor:
            return (
                f"step {step:,} was skipped although the loss scale, {scale_text(scale)}, is at "
                "scaler.floor: it overflows, and a smaller scale is not allowed"
            )
        return None
