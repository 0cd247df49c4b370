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
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Hear = Callable[..., None]


class Listener(Protocol):
    """Who is told. Each gets what the method was called with, the scaler first."""

    def scaled(self, scaler: GradScaler, outputs: Any) -> None:
        """A loss was multiplied by the scale."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """The gradients of an optimizer were divided by it, and checked."""

    def checked(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """They were checked alone."""

    def stepping(self, scaler: GradScaler, optimizer: Optimizer, *args: Any, **named: Any) -> None:
        """An optimizer is about to step, or to be skipped."""

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """The scale is about to change, and the flags to be forgotten."""

    def updated(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """It has changed."""

    def propagated(self, loss: Tensor, *args: Any, **named: Any) -> None:
        """A backward pass was made from here."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""


class Taps:
    """The wraps. `guard` calls the listener, and lets no error of ours reach the loop."""

    def __init__(self, listener: Listener, guard: Callable[..., None]) -> None:
        self._guard = guard
        self._before: dict[str, Hear] = {"step": listener.stepping, "update": listener.updating}
        self._after: dict[str, Hear] = {
            "scale": listener.scaled,
            "unscale_": listener.unscaled,
            "_check_inf_per_device": listener.checked,
            "update": listener.updated,
            "backward": listener.propagated,
        }
        self._stepped = listener.stepped
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
        for owner, name, original, wrapped in self._wraps:
            if vars(owner)[name] is wrapped:
                setattr(owner, name, original)
        self._wraps.clear()
        self._before.clear()
        self._after.clear()
        if self._hook is not None:
            self._hook.remove()

    def _wrap(self, owner: type, name: str) -> None:
        original = vars(owner)[name]
        guard, before, after = self._guard, self._before, self._after

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if name in before:
                guard(before[name], this, *args, **kwargs)
            result = original(this, *args, **kwargs)
            if name in after:
                guard(after[name], this, *args, **kwargs)
            return result

        # As torch.compiler.disable marks it, which takes a second to import: a graph ends before.
        wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)
        self._wraps.append((owner, name, original, wrapped))

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._guard(self._stepped, optimizer)

    _after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _sharded_scalers() -> list[type]:
    """FSDP1's own, if the script has loaded it: to import it takes a second."""
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    return [] if module is None else [module.ShardedGradScaler]
