"""Calls of modules in the reference pass, and what is kept of each. This module imports torch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from halfstep.precision_lab.error_statistics import Sums
from halfstep.precision_lab.preservation import Kept

#: Called with a module, its own call and the arguments; returns the call's result.
Handler = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
NO_PASS = -1  # torch's id of the running backward pass, outside any
_handlers: list[Handler] = []


class Leaves:
    """The leaves of a tree of arguments or results; fields of dataclasses are leaves too."""

    def __init__(self, tree: Any) -> None:
        values, self._spec = tree_flatten(tree)
        self._count = len(values)
        #: By position of a dataclass: an empty one, the names of its fields, and their leaves.
        self._inner: dict[int, tuple[object, list[str], Leaves]] = {}
        self.flat: list[Any] = []
        for index, value in enumerate(values):
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
                inner = Leaves([getattr(value, name) for name in names])
                self.flat += inner.flat
                self._inner[index] = _with(value, names, [None] * len(names)), names, inner
            else:
                self.flat.append(value)

    def rebuild(self, flat: Sequence[object]) -> Any:
        """Return a tree like this one with other leaves."""
        following, values = iter(flat), []
        for index in range(self._count):
            if index in self._inner:
                empty, names, inner = self._inner[index]
                fields = inner.rebuild([next(following) for _ in inner.flat])
                values.append(_with(empty, names, fields))
            else:
                values.append(next(following))
        return tree_unflatten(values, self._spec)

    def without_values(self) -> Self:
        """Drop the leaves; the structure stays."""
        self.flat = [None] * len(self.flat)
        for _, _, inner in self._inner.values():
            inner.without_values()
        return self


class Call:
    """One call of a module, or of the loss function, in the reference pass."""

    def __init__(self, name: str, module: nn.Module | None, number: int) -> None:
        self.name, self.module, self.number = name, module, number
        self.children: list[Call | None] = []  # None: not recorded
        self.random = (0, 0)  # indices of the generators' states before and after
        self.state: dict[str, Kept] = {}  # the module's own buffers and tensors, before the call
        #: By position among the leaves: a kept tensor, or any other value as it was passed.
        self.inputs: list[object] = []
        self.outputs: list[object] = []
        self.result: Leaves | None = None
        #: Results that are arguments overwritten in place: position of the argument by that of the
        #: result.
        self.overwritten: dict[int, int] = {}
        #: Gradients by position among the leaves.
        self.input_gradients: dict[int, Tensor] = {}
        self.output_gradients: dict[int, Tensor] = {}
        # ---- In low precision
        self.output_dtypes: list[torch.dtype | None] = []
        self.dtype: torch.dtype | None = None  # of the first result
        self.local_gradients: dict[int, Tensor] = {}  # of the inputs, scaled
        self.parameters: set[int] = set()  # ids of those that it uses itself
        self.measured = Measured()

    def release(self) -> None:
        """Drop what the local runs needed."""
        self.inputs, self.state = [], {}
        for child in filter(None, self.children):
            child.outputs, child.output_gradients, child.result = [], {}, None


class Measured:
    """Errors of one call: sums that are still on the device."""

    def __init__(self) -> None:
        self.is_called = False
        self.why_unknown: str | None = None  # why there is no local error
        self.forward: Sums | None = None
        self.forward_inherited: Tensor | None = None
        self.backward: list[Sums] = []
        self.backward_inherited: list[Tensor] = []
        self.local_forward: Sums | None = None
        self.local_backward: Sums | None = None
        #: Local errors with the module in fp32, as its low-precision input arrives.
        self.fp32_forward: Sums | None = None
        self.fp32_backward: Sums | None = None


@contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Hand every call of a module to a handler, the innermost one."""
    original = nn.Module.__call__
    is_first = not _handlers
    _handlers.append(handler)

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        if isinstance(module, DistributedDataParallel):  # without its collective operations
            return module.module(*args, **kwargs)
        return _handlers[-1](module, partial(original, module), args, kwargs)

    try:
        if is_first:  # takes a millisecond: every subclass is looked through
            nn.Module.__call__ = call  # type: ignore[method-assign]
        yield
    finally:
        _handlers.pop()
        if is_first:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def is_float(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with a precision: of floats, on strided memory."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.layout == torch.strided and not value.is_nested


def in_backward() -> bool:
    """Return whether a backward pass is running: activation checkpointing repeats a forward."""
    return torch._C._current_graph_task_id() != NO_PASS


def _with(value: object, names: Sequence[str], fields: Sequence[object]) -> object:
    """Return a copy of a dataclass with other values, also of frozen fields."""
    changed = copy(value)
    for name, field in zip(names, fields, strict=True):
        object.__setattr__(changed, name, field)
    return changed
