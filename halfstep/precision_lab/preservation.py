"""State that a precision diff leaves as it was. This module imports torch."""

import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
MUTABLE = (list, dict, set, deque)  # including their subclasses
#: Containers of a module that are restored, each with its values.
MOST_CONTAINERS = 10_000


class Kept:
    """A tensor that still has its values after an operation has overwritten it in place."""

    __slots__ = ("__weakref__", "is_written", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_written = tensor, False


class KeptTensors:
    """Copies each kept tensor before the first operation that overwrites its memory."""

    def __init__(self) -> None:
        self._by_storage: dict[int, WeakSet[Kept]] = {}
        self.has_copied = False  # whether any kept tensor was overwritten

    def keep(self, tensor: Tensor) -> Kept:
        """Keep a tensor's present values, without a copy for now."""
        kept = Kept(tensor.detach())
        if (storage := _storage(tensor)) is not None:
            self._by_storage.setdefault(storage, WeakSet()).add(kept)
        return kept

    def before_write(self, tensor: Tensor) -> None:
        """Copy what is kept of a tensor's memory."""
        storage = _storage(tensor)
        for kept in self._by_storage.pop(storage, ()) if storage is not None else ():
            with torch.no_grad():
                kept.tensor = kept.tensor.clone()
            kept.is_written = self.has_copied = True


class RandomState:
    """State of the random generators: Python's, NumPy's, and torch's of some devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._python, self._torch = random.getstate(), torch_state(devices)
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self._python)
        set_torch_state(self._devices, self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def torch_state(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the state of torch's generators: the CPU's, and those of the devices."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "cpu"]
    return [torch.get_rng_state(), *others]


def set_torch_state(devices: Sequence[torch.device], state: Sequence[Tensor]) -> None:
    """Set the state of torch's generators."""
    torch.set_rng_state(state[0])
    others = (device for device in devices if device.type != "cpu")
    for device, own in zip(others, state[1:], strict=True):
        torch.get_device_module(device).set_rng_state(own, device)


@contextmanager
def preserve_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, and the contents of their containers, also nested ones."""
    before = [(module, dict(vars(module))) for module in modules]
    contents = {
        id(container): (container, container.copy())
        for module in modules
        for container in containers_of(module)
    }
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in contents.values():
            if container or content:
                _refill(container, content)


def containers_of(module: nn.Module) -> Iterator[Any]:
    """Yield the containers among a module's attributes, and those in them."""
    found: dict[int, object] = {}
    waiting = list(vars(module).values())
    while waiting and len(found) < MOST_CONTAINERS:
        value = waiting.pop()
        if isinstance(value, tuple):
            waiting += value
        elif isinstance(value, MUTABLE) and hasattr(value, "copy") and id(value) not in found:
            found[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    yield from found.values()


@contextmanager
def preserve_tensors(tensors: Sequence[Tensor], kept: KeptTensors) -> Iterator[None]:
    """Restore the values of tensors that operations seen by `kept` overwrite."""
    slots = [(tensor, kept.keep(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, slot in slots:
            if slot.is_written:
                kept.before_write(tensor)
                tensor.data.copy_(slot.tensor)  # leaves the version as it was


def state_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield a module's buffers and tensor attributes, each as a dictionary and its key.

    Not attributes with a gradient, which a forward pass computes.
    """
    for values in (module._buffers, vars(module)):
        for name, value in list(values.items()):
            if isinstance(value, Tensor) and not value.requires_grad:
                yield values, name, value


@contextmanager
def copy_state(modules: Sequence[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Give modules copies of their buffers and attributes; floating ones in a dtype, if given.

    Inside of preserve_attributes, which restores the originals.
    """
    copies: dict[int, Tensor] = {}
    for module in modules:
        for values, name, tensor in state_tensors(module):
            target = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to(target, copy=True)
            values[name] = copies[id(tensor)]
    yield


@contextmanager
def cast_parameters(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[dict[int, Any]]:
    """Give modules parameters in a dtype; yield them by the id of the original.

    Parameters of that dtype stay. The originals, which an optimizer refers to, are not changed.
    """
    casts: dict[int, Any] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                is_other = parameter is not None and parameter.is_floating_point()
                if parameter is None or not is_other or parameter.dtype == dtype:
                    continue
                if id(parameter) not in casts:
                    cast = parameter.detach().to(dtype)
                    casts[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
                before.append((module, name, parameter))
                module._parameters[name] = casts[id(parameter)]
        yield casts
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


@contextmanager
def no_global_hooks() -> Iterator[None]:
    """Suspend the hooks that are registered for all modules."""
    before = {name: getattr(module_hooks, name) for name in GLOBAL_HOOKS}
    for name in GLOBAL_HOOKS:
        setattr(module_hooks, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(module_hooks, name, hooks)


@contextmanager
def no_autocast(device_type: str) -> Iterator[None]:
    """Disable autocast, also where a module enables it."""
    enter, ours = torch.autocast.__enter__, threading.get_ident()

    def enter_disabled(region: torch.autocast) -> object:
        if threading.get_ident() != ours:
            return enter(region)  # type: ignore[no-untyped-call]
        enabled, region._enabled = region._enabled, False
        try:
            return enter(region)  # type: ignore[no-untyped-call]
        finally:
            region._enabled = enabled

    torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def full_fp32() -> Iterator[None]:
    """Compute products of fp32 numbers in fp32: without TF32, and without bf16 on a CPU."""
    backends: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
    ]
    with ExitStack() as stack:
        for backend in backends:
            stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = "ieee"
        yield


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, for example
        return None


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, deque):
        value.clear()
        value.extend(content)
    else:
        value.clear()
        value.update(content)
