"""What the passes of a precision diff share: its data, and calls of modules that are intercepted.

A precision diff makes one pass in the reference's precision and one in low precision, see
`reference_pass` and `low_pass`. This module imports torch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halfstep.precision_lab.call_records import Call, Leaves, in_backward
from halfstep.precision_lab.dispatch_modes import EqualOperations
from halfstep.precision_lab.preservation import (
    KeptTensors,
    cast_parameters,
    full_fp32,
    no_autocast,
)

#: Calls of one module that are recorded; an RNN may call a cell thousands of times.
MOST_CALLS = 64


class Setting:
    """Data shared by all passes of a diff."""

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        device_type: str,
        devices: Sequence[torch.device],
        reference: torch.dtype,
        unit: float,
        scale: float,
    ) -> None:
        self.names, self.modules = names, list(names)
        self.device_type, self.devices = device_type, devices
        self.reference, self.unit, self.scale = reference, unit, scale
        self.kept = KeptTensors()
        self.reference_mode = EqualOperations(self.kept.before_write, reference)
        own = [p for m in self.modules for p in m._parameters.values() if p is not None]
        self.parameters = {id(parameter): parameter for parameter in own}
        self.tied = {key for key, uses in Counter(map(id, own)).items() if uses > 1}

    @contextmanager
    def in_reference(self, modules: Sequence[nn.Module]) -> Iterator[dict[int, Any]]:
        """Compute in the reference's precision; yield the cast parameters by the original's id."""
        casting = cast_parameters(modules, self.reference)
        with no_autocast(self.device_type), full_fp32(), self.reference_mode, casting as casts:
            yield casts


class Pass:
    """A forward and a backward pass whose calls of modules are intercepted."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._stack: list[Call] = []
        self._is_plain = False  # in a call that is not recorded

    def _call_module(
        self, module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any
    ) -> object:
        is_repeated = in_backward()  # by activation checkpointing
        is_inside = self._stack or is_repeated
        if self._is_plain or module not in self._setting.names or not is_inside:
            return run(*args, **kwargs)
        leaves = Leaves((args, kwargs))
        values = [self._cast(value) for value in leaves.flat]
        if is_repeated:
            args, kwargs = leaves.rebuild(values)
            return run(*args, **kwargs)
        call = self._next_call(module)
        if call is None:
            self._is_plain = True
            try:
                args, kwargs = leaves.rebuild(values)
                return run(*args, **kwargs)
            finally:
                self._is_plain = False
        return self._record(call, run, leaves, values)

    def _cast(self, value: object) -> Any:
        return value

    def _next_call(self, module: nn.Module) -> Call | None:
        raise NotImplementedError

    def _record(
        self, call: Call, run: Callable[..., object], leaves: Leaves, values: list[object]
    ) -> Any:
        raise NotImplementedError

    def _run(self, call: Call, run: Callable[..., Any], leaves: Leaves, values: list[Any]) -> Any:
        args, kwargs = leaves.rebuild(values)
        self._stack.append(call)
        try:
            return run(*args, **kwargs)
        finally:
            self._stack.pop()
