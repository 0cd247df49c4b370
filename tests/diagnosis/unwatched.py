"""Runs a loop in this process from fresh state, without a watch or with an observer."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.diagnosis.parts import DEVICE
from tests.diagnosis.registry import Loop, WatchCall


class Silent:
    """Return value of a `watch` that watches nothing. It keeps the logged numbers."""

    def __init__(self, logged: list[tuple[str, float]]) -> None:
        self._logged = logged

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._logged += [(name, float(value)) for name, value in values.items()]

    def loss(self, loss: Any) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


class Unwatched:
    """Replaces halfstep.watch and watches nothing; on_watch: called with the modules."""

    #: All that the loop under way has made.
    optimizers: ClassVar[list[Optimizer]] = []

    def __init__(self, on_watch: Callable[..., None] = lambda *_: None) -> None:
        self._on_watch = on_watch
        self.logged: list[tuple[str, float]] = []

    def __call__(self, *modules: nn.Module, **_options: Any) -> Silent:
        self._on_watch(*modules)
        return Silent(self.logged)


@dataclass
class Ended:
    """How a loop ended: its weights, buffers and optimizer state, or its exception."""

    error: str = ""
    exception: Exception | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    moved: int = 0
    warnings: list[str] = field(default_factory=list)

    def nonfinite(self, kind: str) -> list[str]:
        """Return the names of nonfinite tensors: weights, buffers or state."""
        return [
            name
            for name, value in self.state.items()
            if name.startswith(f"{kind} ") and not value.isfinite().all()
        ]

    def is_same(self, other: "Ended") -> bool:
        """Return whether two loops ended with the same bits."""
        return (
            self.error == other.error
            and self.state.keys() == other.state.keys()
            and all(_same_bits(value, other.state[name]) for name, value in self.state.items())
        )

    def differences(self, other: "Ended") -> list[str]:
        """Return the names of different tensors."""
        names = [n for n in self.state if n in other.state]
        different = [n for n in names if not _same_bits(self.state[n], other.state[n])]
        different += sorted(self.state.keys() ^ other.state.keys())
        if self.error != other.error:
            different.append(f"raised {self.error!r} and {other.error!r}")
        return different


def run(loop: Loop, watch: WatchCall) -> Ended:
    """Train a loop with fresh seeds; an exception is its end."""
    ended = Ended()
    modules: list[nn.Module] = []
    first: dict[str, Tensor] = {}

    def call(*given: nn.Module, **options: Any) -> Any:
        for module in given:
            for name, value in _state_of(module, len(modules)):
                first[name] = value
            modules.append(module)
        return watch(*given, **options)

    _seed(loop.seed)
    torch._dynamo.reset() if "torch._dynamo" in _load() else None
    # A recipe is given its device.
    has_default = DEVICE == "cpu" or loop.recipe is not None
    place = nullcontext() if has_default else torch.device(DEVICE)
    with place, _optimizers() as optimizers, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loop.train(call)
        except Exception as error:
            ended.error, ended.exception = f"{type(error).__name__}: {error}", error
    ended.warnings = [f"{each.category.__name__}: {each.message}" for each in caught]
    for index, module in enumerate(modules):
        ended.state |= dict(_state_of(module, index))
    for index, optimizer in enumerate(optimizers):
        ended.state |= dict(_tensors(f"state {index}", optimizer.state_dict()["state"]))
    ended.moved = sum(
        not _same_bits(value, ended.state[name])
        for name, value in first.items()
        if name.startswith("weight ") and name in ended.state
    )
    return ended


def _load() -> Mapping[str, Any]:
    import sys

    return sys.modules


@contextmanager
def _optimizers() -> Iterator[list[Optimizer]]:
    """Keep every optimizer that is made."""
    made = Unwatched.optimizers
    made.clear()
    init = Optimizer.__init__

    def keep(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    with patch.object(Optimizer, "__init__", keep):
        yield made


def _state_of(module: nn.Module, index: int) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"weight {index} {name}", _plain(parameter)
    for name, buffer in module.named_buffers():
        yield f"buffer {index} {name}", _plain(buffer)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, _plain(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name} {key}", each)
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _tensors(f"{name} {key}", each)
    elif isinstance(value, int | float):
        yield name, torch.tensor(value, dtype=torch.float64)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(first, second)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
