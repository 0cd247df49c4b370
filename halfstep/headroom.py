"""How far a step stays below fp16's largest number, 65,504, module by module.

In a step that is looked at, each module's output and the gradient that comes back to it are
measured where they pass, by a hook of torch's for all modules at once: no module carries anything
of ours, so that one may be copied, saved or compiled at any time. Between those steps there is no
hook. What is measured is the largest magnitude: a kernel each, a number each, and no copy of an
activation. Gradients are times the loss scale here, as it is they that overflow.

A module with modules of its own is left to those, unless it has parameters itself. This module
imports torch.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from halfstep.spool import Event


class Compiled(RuntimeError):
    """Modules are compiled: a hook that comes and goes would have them compiled anew each time."""


class Headroom:
    """Measures what passes between `begin` and `end`."""

    def __init__(self) -> None:
        self._names: Mapping[nn.Module, str] = {}
        self._hook: RemovableHandle | None = None
        #: Largest magnitudes by module, of outputs and of their gradients.
        self._largest: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    @property
    def is_on(self) -> bool:
        """Whether a step is being looked at."""
        return self._hook is not None

    def begin(self, names: Mapping[nn.Module, str]) -> None:
        """Look at the step that comes. Raises Compiled."""
        if _has_compiled():
            raise Compiled(" ".join((Compiled.__doc__ or "").split()))
        self._names, self._largest = names, ({}, {})
        self._hook = register_module_forward_hook(self._passed)

    def end(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def measured(self) -> tuple[list[str], Tensor]:
        """Return modules, and what was largest of each: (2, M), outputs first, -1 for nothing."""
        outputs, gradients = self._largest
        names = list(outputs)
        if not names:
            return [], torch.zeros(2, 0)
        nothing = torch.full_like(outputs[names[0]], -1.0)
        tensors = [each.get(name, nothing) for each in (outputs, gradients) for name in names]
        device = nothing.device
        row = torch.stack([tensor.to(device, non_blocking=True) for tensor in tensors])
        return names, row.view(2, len(names))

    def _passed(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        name = self._names.get(module)
        if name is None or (tensor := _first_tensor(output)) is None:
            return
        self._note(0, name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._note(1, name, gradient))  # type: ignore[no-untyped-call]

    def _note(self, kind: int, name: str, tensor: Tensor) -> None:
        """Keep the largest. What a hook raises would end the script; one may outlive its step."""
        if self._hook is None or not tensor.is_floating_point() or not tensor.numel():
            return
        try:
            largest = torch.linalg.vector_norm(_local(tensor), torch.inf).float()
            before = self._largest[kind].get(name)
            self._largest[kind][name] = (
                largest if before is None else torch.maximum(before, largest)
            )
        except (RuntimeError, NotImplementedError, TypeError):  # of a kind that has no magnitude
            self._largest[kind].pop(name, None)


def headroom_event(step: int, scale: float, names: list[str], largest: Tensor) -> Event:
    """Say it of a step whose numbers have arrived."""
    outputs, gradients = largest.tolist()
    modules = [
        {"name": name, "activation": output, "gradient": None if gradient == -1 else gradient}
        for name, output, gradient in zip(names, outputs, gradients, strict=True)
    ]
    return {"event": "headroom", "step": step, "scale": scale, "modules": modules}


def looked_at(names: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the modules whose outputs are measured: innermost, or with parameters of their own."""
    return {
        module: name
        for module, name in names.items()
        if next(module.children(), None) is None
        or next(module.parameters(recurse=False), None) is not None
    }


def _local(tensor: Tensor) -> Tensor:
    """Return what this device has of it."""
    plain: Tensor = tensor.detach()
    local: Tensor = plain.to_local() if hasattr(plain, "to_local") else plain
    return local


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, Mapping | tuple | list):
        return next((each for each in values if isinstance(each, Tensor)), None)
    return None


def _has_compiled() -> bool:
    """Tell whether this process has compiled anything with torch.compile."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return bool(frames and frames.FRAME_COUNTER)
