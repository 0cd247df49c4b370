"""Distance of a step's values from fp16's largest number, 65,504, by module.

In a measured step, each module's output and its gradient are measured by one global hook for all
modules: modules carry no state of ours, so they may be copied, saved or compiled at any time.
Between measured steps there is no hook. Measured is the largest magnitude: one kernel and one
number each, without a copy of an activation. Optionally also the smallest nonzero magnitude, to
compare with fp16's smallest, 2^-24: that takes a copy of one activation at a time. Gradients
include the loss scale, because scaled gradients are those that overflow.

A module with submodules is skipped unless it has parameters of its own. This module imports torch.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from halfstep.telemetry import events
from halfstep.telemetry.events import Event

#: Integer types of the same size as a float.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Compiled(RuntimeError):
    """Modules are compiled: a temporary hook would recompile them each time."""

    def __init__(self) -> None:
        super().__init__(" ".join((type(self).__doc__ or "").split()).removesuffix("."))


class Measured(NamedTuple):
    """A module's name and the dtype of its output."""

    name: str
    dtype: str


class Headroom:
    """Measures all modules between `begin` and `end`."""

    def __init__(self, *, with_smallest: bool = False) -> None:
        self._with_smallest = with_smallest
        self._names: Mapping[nn.Module, str] = {}
        self._hook: RemovableHandle | None = None
        self._types: dict[str, str] = {}
        #: Magnitudes by module, (largest, smallest): outputs, and their gradients.
        self._found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    @property
    def is_on(self) -> bool:
        """Whether a step is being measured."""
        return self._hook is not None

    def begin(self, names: Mapping[nn.Module, str]) -> None:
        """Start measuring the next step. Raises Compiled."""
        if has_compiled():
            raise Compiled
        self._names, self._found, self._types = names, ({}, {}), {}
        self._hook = register_module_forward_hook(self._on_forward)

    def end(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the measurement."""
        hook, self._hook = self._hook, None
        try:
            yield
        finally:
            self._hook = hook

    def read(self) -> tuple[list[Measured], Tensor]:
        """Return modules and their magnitudes, (2, K, M): outputs first, -1 if unmeasured.

        K: the largest magnitude and, if enabled, the smallest.
        """
        outputs, gradients = self._found
        names = list(outputs)
        if not names:
            return [], torch.zeros(2, 1 + self._with_smallest, 0, dtype=torch.float32, device="cpu")
        nothing = torch.full_like(outputs[names[0]], -1.0)
        tensors = [by_name.get(name, nothing) for by_name in (outputs, gradients) for name in names]
        device = nothing.device
        rows = torch.stack([tensor.to(device, non_blocking=True) for tensor in tensors])
        shaped = rows.view(2, len(names), -1).transpose(1, 2)
        return [Measured(name, self._types[name]) for name in names], shaped

    def _on_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        if self._hook is None or torch.compiler.is_compiling():
            return
        if not (module.training and torch.is_grad_enabled()):
            return
        name = self._names.get(module)
        if name is None or (tensor := _first_tensor(output)) is None:
            return
        self._note(0, name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._note(1, name, gradient))  # type: ignore[no-untyped-call]

    def _note(self, kind: int, name: str, tensor: Tensor) -> None:
        """Store the largest magnitude; suppress errors, which would end the script."""
        if self._hook is None or not tensor.is_floating_point() or not tensor.numel():
            return
        try:
            values = _magnitudes(_local(tensor), with_smallest=self._with_smallest)
            before = self._found[kind].get(name)
            self._found[kind][name] = values if before is None else _together(before, values)
            if kind == 0:
                self._types[name] = str(tensor.dtype).removeprefix("torch.")
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
            KeyError,
        ):  # a dtype or layout without magnitudes
            self._found[kind].pop(name, None)


def headroom_event(step: int, scale: float, measured: list[Measured], magnitudes: Tensor) -> Event:
    """Return the headroom event of a step. magnitudes: from `Headroom.read`."""
    modules: list[dict[str, Any]] = [
        {"name": module.name, "dtype": module.dtype} for module in measured
    ]
    for kind, rows in zip(("activation", "gradient"), magnitudes.tolist(), strict=True):
        for field, numbers in zip((kind, f"smallest_{kind}"), rows, strict=False):
            for module, number in zip(modules, numbers, strict=True):
                is_none = number == -1 or (field != kind and number == math.inf)
                module[field] = None if is_none else number
    measurements = [events.HeadroomModule(**module) for module in modules]
    return events.Headroom(step=step, scale=scale, modules=measurements)


def find_modules_to_measure(names: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the modules to measure: those without submodules, or with parameters of their own."""
    return {
        module: name
        for module, name in names.items()
        if next(module.children(), None) is None
        or next(module.parameters(recurse=False), None) is not None
    }


def _magnitudes(tensor: Tensor, *, with_smallest: bool) -> Tensor:
    """Return the largest and optionally the smallest nonzero magnitude; inf if there is none."""
    if not with_smallest:
        norm: Tensor = torch.linalg.vector_norm(tensor, torch.inf)
        return norm.float()[None]
    # Nonnegative floats are ordered like their bits as integers, with NaN above infinity.
    # Subtracting one and masking the sign turns 0 into the largest integer. (On a CPU ten times as
    # fast as a norm and a masked minimum.)
    whole = BITS[tensor.element_size()]
    unsigned = torch.iinfo(whole).max
    bits = tensor.view(whole).bitwise_and(unsigned)
    largest: Tensor = bits.amax().view(tensor.dtype)
    smallest: Tensor = bits.sub_(1).bitwise_and_(unsigned).amin().add(1).view(tensor.dtype)
    smallest = torch.where(smallest == 0, torch.inf, smallest)
    return torch.stack([largest.float(), smallest.float()])


def _together(one: Tensor, other: Tensor) -> Tensor:
    largest = torch.maximum(one[:1], other[:1])
    return torch.cat([largest, torch.minimum(one[1:], other[1:])])


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, detached."""
    plain: Tensor = tensor.detach()
    local: Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return local


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, Mapping | tuple | list):
        return next((value for value in values if isinstance(value, Tensor)), None)
    return None


def has_compiled() -> bool:
    """Return whether this process has compiled anything with torch.compile."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return bool(frames and frames.FRAME_COUNTER)
