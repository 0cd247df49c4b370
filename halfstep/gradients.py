"""Gradients of an optimizer: how large each one is, and what is not finite in it.

Nothing in here waits for a device unless it says so. This module imports torch.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.rows import Counts

#: What wrappers of modules put into the names of parameters.
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class Measured(NamedTuple):
    """The gradients of one optimizer in one step: numbers on a CPU, else tensors of the device."""

    total: Tensor | float  # L2 over all of them
    norms: Tensor | list[float]  # L2 of each, in the order of the names; 0 where there is none
    counts: Counts | None = None  # on a CPU, of those that are not finite


class Gradients:
    """Those of somebody's optimizer, whose parameters may have any type and lie on any device."""

    def __init__(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        """names: of parameters, in forward order; others are called by their place."""
        self.optimizer = optimizer
        own = {
            parameter: f"group{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }
        known = {parameter: name for parameter, name in names.items() if parameter in own}
        self.names = list((known | {p: n for p, n in own.items() if p not in known}).values())
        self.parameters = [*known, *(p for p in own if p not in known)]
        self.device = self.parameters[0].device
        self._is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters)
        self._is_plain = all(
            p.device == self.device and not hasattr(p, "to_local") for p in self.parameters
        )
        self._zero = torch.zeros((), device=self.device)
        self.no_norms = torch.zeros(len(self.names), device=self.device)  # of a step without it

    def is_complete(self) -> bool:
        """Tell whether the optimizer has the parameters that it had."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups) == len(self.names)

    def rate(self) -> float | Tensor:
        """Return the learning rate of the first group: a tensor if only its device knows it."""
        rate = self.optimizer.param_groups[0]["lr"]
        return rate if isinstance(rate, Tensor) and not rate.is_cpu else float(rate)

    def measure(self, scale: Tensor | None = None) -> Measured | None:
        """Measure them; None if there are none. scale: what they are still multiplied by."""
        gradients = [p.grad for p in self.parameters]
        present = [g for g in gradients if g is not None]
        if not present:
            return None
        if present[0].requires_grad:  # of a backward pass that can be differentiated itself
            present = [g.detach() for g in present]
        if not self._is_plain or any(g.is_sparse for g in present):
            present = [local_elements(g) for g in present]
        norms = torch._foreach_norm(present, dtype=torch.float32 if self._is_half else None)
        if not self._is_plain:
            norms = tuple(norm.to(self.device, non_blocking=True) for norm in norms)
        if len(present) < len(gradients):
            found = iter(norms)
            norms = tuple(self._zero if g is None else next(found) for g in gradients)
        if self._zero.is_cpu:
            return self._numbers(norms, 1.0 if scale is None else scale.item())
        stacked = torch.stack(norms)
        if scale is not None:
            stacked = stacked / scale
        return Measured(torch.linalg.vector_norm(stacked), stacked)

    def _numbers(self, norms: tuple[Tensor, ...], scale: float) -> Measured:
        """Read norms in host memory: nobody waits."""
        values = [norm.item() for norm in norms]
        if scale != 1.0:
            values = [value / scale for value in values]
        if math.isfinite(sum(values)):
            return Measured(math.hypot(*values), values)
        counts = {
            position: count_nonfinite(gradient)
            for position, value in enumerate(values)
            if not math.isfinite(value) and (gradient := self.parameters[position].grad) is not None
        }
        return Measured(sum(values), values, counts)


def parameter_names(modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, str]:
    """Name the parameters of modules as their owner knows them: "head.weight".

    Of several modules, each one's name is its class's, numbered if there are two of a class.
    """
    names: dict[nn.Parameter, str] = {}
    inner = [plain(module) for module in modules]
    classes = [type(module).__name__ for module in inner]
    for index, module in enumerate(inner):
        name = classes[index]
        number = classes[:index].count(name) + 1
        prefix = "" if len(modules) == 1 else f"{name}{number if classes.count(name) > 1 else ''}."
        for path, parameter in module.named_parameters():
            for wrapper in WRAPPERS:
                path = path.replace(wrapper, "")
            names.setdefault(parameter, prefix + path)
    return names


def plain(module: nn.Module) -> nn.Module:
    """Return the module inside of what compiles or distributes it."""
    inner = getattr(module, "_orig_mod", module)
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    return module if inner is module else plain(inner)


def local_elements(gradient: Tensor) -> Tensor:
    """Return what this device has of a gradient: a shard, the rows of a sparse one as they came."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def elements(gradient: Tensor) -> Tensor:
    """Return what a gradient holds; of a sparse one, each row summed up and zeros left out.

    On a GPU the host waits for the number of a sparse gradient's rows.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def count_nonfinite(gradient: Tensor) -> tuple[int, int]:
    """Return how many elements are inf, and how many are NaN. The host waits."""
    values = elements(gradient)
    return int(values.isinf().sum()), int(values.isnan().sum())
