"""Adapter for frameworks with their own loss scaler, presented to a watched loop as torch's.

An adapter calls, in the order of a step and within the watch's guard: `loss`, `gradients`,
`on_decision`, `on_update`. Nothing here waits for the device. This module imports torch.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from halfstep.session.watch_session import Watch


class ExternalScaler:
    """The scaler and the optimizer of such a framework."""

    _enabled = True  # this and the next three: attributes of torch's scaler that the loop reads

    def __init__(self, watch: Watch, name: str) -> None:
        """name: of the optimizer's class."""
        self._loop = watch._loop
        self._scale: Tensor = torch.ones((), dtype=torch.float32, device="cpu")
        self._growth_tracker: Tensor | None = None
        kind = type(name, (_Parameters,), {})  # the loop names an optimizer by its class
        self._optimizer: Any = kind()
        self._per_optimizer_states: dict[int, dict[str, object]] = {}
        self._as_scaler = cast(GradScaler, self)

    def loss(self, loss: Tensor) -> None:
        """Record a loss before it is scaled; the mean of all losses of a step is recorded."""
        self._loop.add_loss(loss)

    def gradients(
        self, parameters: Sequence[Any], scale: Tensor | float, rate: Tensor | float
    ) -> None:
        """Measure the gradients of parameters, which are multiplied by this scale."""
        [group] = self._optimizer.param_groups
        if not group["params"]:
            group["params"] = list(parameters)
        group["lr"], self._scale = rate, _tensor(scale)
        self._per_optimizer_states = {}  # the flag is not known yet
        optimizer = cast(Optimizer, self._optimizer)
        self._loop.scalers.checked(self._as_scaler, None, optimizer)

    def on_decision(self, was_skipped: Tensor | bool) -> None:
        """Record whether the step was skipped; the scale is still the one that was used."""
        flag = _tensor(was_skipped)
        state = {"found_inf_per_device": {flag.device: flag}, "stage": OptState.STEPPED}
        self._per_optimizer_states = {id(self._optimizer): state}
        self._loop.scalers.updating(self._as_scaler)

    def on_update(self, scale: Tensor | float) -> None:
        """Close the step. scale: that of the next step."""
        self._scale = _tensor(scale)
        self._loop.scalers.on_update(self._as_scaler, None)

    def leave_out(self, optimizer: Optimizer) -> None:
        """Ignore a torch optimizer that the framework uses internally."""
        self._loop.state.ignored.add(id(optimizer))


class _Parameters:
    """The attributes of an optimizer that the loop reads."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]


def _tensor(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float32)
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
