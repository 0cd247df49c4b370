"""The learning rate of each step, by attempted or applied steps.

Either the schedule counts attempted steps: the host knows them, and the rate is a Python number.
Or it counts applied steps: with a fused optimizer only the device knows which steps were skipped,
so the rate is computed there, into a tensor that the fused kernel reads. The host waits in neither.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.config_groups import Training
from halfstep.recipe import RecipeError
from halfstep.run_config import ConfigError


class Schedule:
    """Sets the learning rate before a step, and receives the step's result.

    This one changes no rates: the recipe sets them, in training_step or after_step.
    """

    def apply(self, step: int) -> None:
        """Set every group's rate: a number, or a 0-dim device tensor."""

    def count(self, found_inf: Mapping[str, Tensor]) -> None:
        """Count a step. found_inf: of the optimizers that took part, 0-dim, 1 if skipped."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state needed for the next rate, except the number of attempted steps."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""


def has_tensor_rates(training: Training) -> bool:
    """Return whether optimizers read the rate from a tensor, as in a CUDA graph."""
    return training.schedule_counts == "applied" or training.cuda_graph


def make_schedule(
    training: Training,
    optimizers: Mapping[str, Optimizer],
    peaks: Mapping[str, list[float]],
    device: torch.device,
) -> Schedule:
    """Return the configured schedule.

    peaks: initial rate of each group; a loaded optimizer has other rates by now.
    """
    _check_own_schedulers(training, optimizers)
    if training.schedule == "recipe":
        return Schedule()
    if training.schedule_counts == "attempted":
        return AttemptedSchedule(training, optimizers, peaks, device)
    if not training.fused:
        raise ConfigError(
            "training.schedule_counts is applied, but training.fused is False: an unfused "
            "optimizer reads its learning rate on the host; set training.fused to True"
        )
    return AppliedSchedule(training, optimizers, peaks, device)


def _check_own_schedulers(training: Training, optimizers: Mapping[str, Optimizer]) -> None:
    """Raise RecipeError if a scheduler of the recipe would be silently overwritten."""
    for name, optimizer in optimizers.items():
        # torch's schedulers store the initial rate.
        has_own = any("initial_lr" in group for group in optimizer.param_groups)
        if has_own and training.schedule != "recipe":
            raise RecipeError(
                f'optimizer "{name}" has its own learning-rate scheduler, but training.schedule '
                f"is {training.schedule}: set it to recipe and step the "
                "scheduler in after_step, or remove the scheduler"
            )


class AttemptedSchedule(Schedule):
    """Counts every step, skipped or not, as Lightning does: only its number matters."""

    def __init__(
        self,
        training: Training,
        optimizers: Mapping[str, Optimizer],
        peaks: Mapping[str, list[float]],
        device: torch.device,
    ) -> None:
        self._training, self._factor = training, math.nan
        self._groups = [
            (group, peak)
            for name, optimizer in optimizers.items()
            for group, peak in zip(optimizer.param_groups, peaks[name], strict=True)
        ]
        if has_tensor_rates(training):
            for group, _peak in self._groups:
                # Fused kernels require fp32.
                group["lr"] = torch.zeros((), dtype=torch.float32, device=device)

    def apply(self, step: int) -> None:
        """Set every group's rate: a number, passed to the kernel as an argument, or a tensor."""
        factor = learning_rate_factor(self._training, step)
        for group, peak in self._groups:
            if not has_tensor_rates(self._training):
                group["lr"] = peak * factor
            elif factor != self._factor:
                group["lr"].fill_(peak * factor)
        self._factor = factor


class AppliedSchedule(Schedule):
    """Counts the steps of each optimizer that the scaler did not skip, as DeepSpeed does."""

    def __init__(
        self,
        training: Training,
        optimizers: Mapping[str, Optimizer],
        peaks: Mapping[str, list[float]],
        device: torch.device,
    ) -> None:
        self._training = training
        # 0-dim, float64: exact up to 2^53 steps, and the cosine needs a float anyway.
        self._applied = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in optimizers
        }
        self._rates: list[tuple[str, float, Tensor]] = []
        for name, optimizer in optimizers.items():
            for group, peak in zip(optimizer.param_groups, peaks[name], strict=True):
                # Fused kernels require fp32.
                group["lr"] = torch.zeros((), dtype=torch.float32, device=device)
                self._rates.append((name, peak, group["lr"]))

    def apply(self, step: int) -> None:
        """Compute every group's rate in place, in the tensor that the optimizer reads."""
        factors = {
            name: _factor_on_device(self._training, applied + 1)
            for name, applied in self._applied.items()
        }
        for name, peak, rate in self._rates:
            rate.copy_(factors[name] * peak)

    def count(self, found_inf: Mapping[str, Tensor]) -> None:
        """Count a step of each optimizer that was not skipped."""
        for name, skipped in found_inf.items():
            self._applied[name] += 1 - skipped

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of applied steps of each optimizer."""
        return dict(self._applied)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue counting from a state."""
        for name, applied in self._applied.items():
            applied.copy_(state[name])


def learning_rate_factor(training: Training, step: int) -> float:
    """Return the factor of the peak learning rate at this step, counted from 1."""
    if step <= training.warmup_steps:
        return step / training.warmup_steps
    if training.schedule == "constant":
        return 1.0
    done = (step - training.warmup_steps) / (training.steps - training.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def _factor_on_device(training: Training, step: Tensor) -> Tensor:
    """Return the same factor for a step number on the device."""
    warmup = training.warmup_steps
    if training.schedule == "constant":
        late = torch.ones_like(step)
    else:
        done = (step - warmup) / max(training.steps - warmup, 1)
        late = 0.5 * (1 + torch.cos(math.pi * done))
    return torch.where(step <= warmup, step / max(warmup, 1), late)


def peak_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, list[float]]:
    """Return every group's initial rate, by the optimizer's name."""
    return {
        name: [_rate(g) for g in optimizer.param_groups] for name, optimizer in optimizers.items()
    }


def _rate(group: dict[str, Any]) -> float:
    return float(group["lr"])
