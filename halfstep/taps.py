"""Where a training loop that is not ours is heard: methods of torch's classes, wrapped for a time.

The truth of a step passes through these, whatever framework calls them: the loss through
`GradScaler.scale`, gradients through `unscale_` (or `_check_inf_per_device`, for a fused optimizer
that nobody unscaled), every optimizer's flag through `update`. Where no scaler lives there are
`Tensor.backward` and the hook after an optimizer's step. This module imports torch.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Hear = Callable[..., None]


class Listener(Protocol):
    """Who is told. Each gets what the method was called with, the scaler first."""

    under_scaler: set[int]  # ids of optimizers that a scaler steps: their own steps say nothing
    on_scaler: Callable[[], None]  # to be called at the first scaler that is heard

    def scaled(self, scaler: GradScaler, outputs: Any) -> None:
        """A loss was multiplied by the scale."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """The gradients of an optimizer were divided by it, and checked."""

    def checked(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """They were checked alone."""

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """The scale is about to change, and the flags to be forgotten."""

    def updated(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """It has changed."""

    def propagated(self, loss: Tensor, *args: Any, **named: Any) -> None:
        """A backward pass was made from here."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""


def _keep_from_compiler(function: Any, *, also_what_it_calls: bool = False) -> None:
    """Have a graph end before this function. As torch.compiler.disable, whose import is slow."""
    function._torchdynamo_disable = True
    beyond = _FrameAction.SKIP if also_what_it_calls else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, beyond)
    set_code_exec_strategy(function.__code__, strategy)


class Taps:
    """The wraps."""

    def __init__(self, listener: Listener, guard: Callable[..., None]) -> None:
        """guard: calls what it is given, and lets no error of ours reach the loop."""
        _keep_from_compiler(getattr(guard, "__func__", guard), also_what_it_calls=True)
        self._guard = guard
        self._before: dict[str, Hear] = {"update": listener.updating}
        self._after: dict[str, Hear] = {
            "scale": listener.scaled,
            "unscale_": listener.unscaled,
            "_check_inf_per_device": listener.checked,
            "update": listener.updated,
            "backward": listener.propagated,
        }
        self._listener = listener
        listener.on_scaler = self._leave_backward  # for the loss is what the scaler gets
        self._wraps: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = []
        self._hook: Any = None

    def arm(self) -> None:
        """Wrap them. A class that overrides a method has its own wrapped too."""
        for owner in (GradScaler, *_sharded_scalers(), Tensor):
            for name in {**self._before, **self._after}:
                if name in vars(owner) and (owner is Tensor) == (name == "backward"):
                    self._wrap(owner, name)
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def disarm(self) -> None:
        """Undo it. Where somebody has wrapped ours meanwhile, ours stays and says nothing."""
        for wrap in self._wraps:
            _unwrap(*wrap)
        self._wraps.clear()
        self._before.clear()
        self._after.clear()
        if self._hook is not None:
            self._hook.remove()

    def _wrap(self, owner: type, name: str) -> None:
        original = vars(owner)[name]
        guard, before, after = self._guard, self._before, self._after
        is_heard_before = name in before

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if is_heard_before and name in before:
                guard(before[name], this, *args, **kwargs)
            result = original(this, *args, **kwargs)
            if hear := after.get(name):
                guard(hear, this, *args, **kwargs)
            return result

        _keep_from_compiler(wrapped)
        setattr(owner, name, wrapped)
        self._wraps.append((owner, name, original, wrapped))

    def _leave_backward(self) -> None:
        self._after.pop("backward", None)
        for wrap in self._wraps:
            if wrap[1] == "backward":
                _unwrap(*wrap)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) not in self._listener.under_scaler:
            self._guard(self._listener.stepped, optimizer)

    _keep_from_compiler(_after_step)


def _unwrap(owner: type, name: str, original: Any, wrapped: Any) -> None:
    if vars(owner)[name] is wrapped:
        setattr(owner, name, original)


def _sharded_scalers() -> list[type]:
    """FSDP1's own, if the script has loaded it: to import it takes a second."""
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    return [] if module is None else [module.ShardedGradScaler]
