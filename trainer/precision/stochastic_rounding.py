"""Stochastic rounding of bf16 weights, by training.rounding: small updates are not lost.

torchao's AdamW computes each update in fp32 and rounds the weight up or down with a probability by
distance, so that its expected value is the fp32 result. Imports torchao.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torchao.optim.adam import _AdamW, single_param_adam

from halfstep.config_groups import Training
from halfstep.run_config import ConfigError
from trainer.repeatability import seed_of_place


def set_stochastic_rounding(optimizers: dict[str, Optimizer], training: Training) -> None:
    """Replace each optimizer by one with stochastic rounding. Raises ConfigError."""
    for name, optimizer in optimizers.items():
        check_has_twin(name, optimizer)
        optimizers[name] = StochasticAdamW(
            optimizer, seed=training.seed, is_compiled=training.compile
        )


def check_has_twin(name: str, optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer unknown to torchao or with its own scheduler."""
    prefix = f'training.rounding is stochastic, but optimizer "{name}"'
    groups = optimizer.param_groups
    # Without weight decay the two are identical.
    is_adamw = type(optimizer) is AdamW or (
        type(optimizer) is Adam and not any(group["weight_decay"] for group in groups)
    )
    if not is_adamw or any(group["maximize"] for group in groups):
        kind = type(optimizer).__name__
        allowed = "AdamW, or Adam without weight decay, that minimizes"
        raise ConfigError(f"{prefix} is {kind}, which torchao does not provide; allowed: {allowed}")
    if any("initial_lr" in group for group in groups):
        raise ConfigError(
            f"{prefix} has its own learning-rate scheduler, which torchao's AdamW ignores; "
            "allowed: training.schedule constant or cosine, without one"
        )


class StochasticAdamW(_AdamW):  # type: ignore[misc]
    """AdamW with stochastic rounding of bf16 weights, reproducible and identical on all ranks."""

    def __init__(self, optimizer: Optimizer, *, seed: int, is_compiled: bool) -> None:
        super().__init__(
            [dict(group) for group in optimizer.param_groups], bf16_stochastic_round=True
        )
        self._seed, self._is_compiled = seed, is_compiled
        self._device = self.param_groups[0]["params"][0].device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update; the random numbers depend only on the run's seed and the number of updates."""
        self._rates_as_tensors()
        devices = [self._device] if self._device.type == "cuda" else []
        # torchao compiles a kernel per shape: that takes a minute, and needs a compiler.
        stance = nullcontext() if self._is_compiled else torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices), stance:
            torch.manual_seed(seed_of_place(b"rounding", self._seed, self._updates()))
            return super().step(closure)

    @torch.no_grad()
    def nearest(self, weight: nn.Parameter) -> Tensor:
        """Return a weight's value after this step with rounding to nearest."""
        self._rates_as_tensors()
        [group] = (
            g for g in self.param_groups if any(weight is parameter for parameter in g["params"])
        )
        zeros = torch.zeros_like(weight)
        state = self.state.get(weight, {})
        first = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": zeros,
            "exp_avg_sq": zeros,
        }
        if group["amsgrad"]:
            first["max_exp_avg_sq"] = zeros
        now = {name: state.get(name, tensor).clone() for name, tensor in first.items()}
        rounded = weight.detach().clone()
        single_param_adam(
            rounded,
            weight.grad,
            now["step"] + 1,
            now["exp_avg"],
            now["exp_avg_sq"],
            now.get("max_exp_avg_sq"),
            group["lr"],
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            True,
            False,
        )
        return rounded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; counts of updates from a fused AdamW are moved to the host."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()

    def _rates_as_tensors(self) -> None:
        """Convert rates to tensors, as torchao requires; a schedule sets numbers."""
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)

    def _updates(self) -> int:
        first = next(iter(self.state.values()), None)
        return int(first["step"]) if first else 0
