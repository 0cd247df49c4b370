"""A framework that has a loss scaler of its own, told to a watched loop as if it had torch's.

An adapter calls, in the order of a step and within the watch's guard: `loss`, `gradients`,
`decided`, `updated`. Nothing in here waits for the device. This module imports torch.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.session.watch_session import Watch


class Foreign:
    """The scaler and the optimizer of such a framework."""

    _enabled = True  # this and the next three as torch's scaler has them, which the loop reads

    def __init__(self, watch: Watch, name: str) -> None:
        """name: the optimizer's."""
        self._loop = watch._loop
        self._scale: Tensor = torch.ones(())
        self._growth_tracker: Tensor | None = None
        kind = type(name, (_Parameters,), {})  # the loop calls an optimizer by its class
        self._optimizer: Any = kind()
        self._per_optimizer_states: dict[int, dict[str, Any]] = {}
        self._as_scaler = cast(GradScaler, self)

    def loss(self, loss: Tensor) -> None:
        """Take a loss, before it is scaled; of several since the last step the mean is told."""
        self._loop.add_loss(loss)

    def gradients(
        self, parameters: Sequence[Any], scale: Tensor | float, rate: Tensor | float
    ) -> None:
        """Measure the gradients of parameters, which are multiplied by this scale."""
        [group] = self._optimizer.param_groups
        if not group["params"]:
            group["params"] = list(parameters)
        group["lr"], self._scale = rate, _tensor(scale)
        optimizer = cast(Optimizer, self._optimizer)
        self._loop.checked(self._as_scaler, None, optimizer)

    def decided(self, was_skipped: Tensor | bool) -> None:
        """Say whether the step was skipped; the scale is still the one that was used."""
        flag = _tensor(was_skipped)
        state = {"found_inf_per_device": {flag.device: flag}}
        self._per_optimizer_states = {id(self._optimizer): state}
        if row := self._loop._open.get(id(self)):
            row.stepped.add(id(self._optimizer))
        self._loop.updating(self._as_scaler)

    def updated(self, scale: Tensor | float) -> None:
        """Close the step: this is the scale of the next one."""
        self._scale = _tensor(scale)
        self._loop.updated(self._as_scaler, None)

    def leave_out(self, optimizer: Optimizer) -> None:
        """Hear nothing of an optimizer of torch's that works inside of the framework's."""
        self._loop.ignored.add(id(optimizer))


class _Parameters:
    """As much of an optimizer as is looked at."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]


def _tensor(value: Tensor | float) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    return tensor.reshape(()).to(torch.float32)
