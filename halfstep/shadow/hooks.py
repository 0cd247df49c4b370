"""Calls of a training loop that a sanitizer needs. This module imports torch."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from halfstep.shadow.lines import ENGINE, place_of_caller
from halfstep.shadow.mode_dependent import leave_to_torch
from halfstep.shadow.operations import Place
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.watching.optimizer_hooks import remove_hooks

AUTOCAST_DEVICES = ("cpu", "cuda")


class ShadowHooks:
    """Wrappers of a scaler's methods, of the engine and of optimizers' steps.

    A step ends with `GradScaler.update`; with an optimizer's step if no loss was scaled; or, if the
    scaler is only used for losses, with the next loss after an optimizer's step.
    """

    def __init__(
        self,
        sanitizer: Sanitizer,
        on_step: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_left_out: Callable[[], None] = lambda: None,
        *,
        is_eager: bool,
    ) -> None:
        """on_step: called at the end of each step.  on_error: with errors of the sanitizer.

        on_left_out: called before a pass, if the loop has left out a step without a scaler.

        is_eager: run compiled functions eagerly, which have no operators to observe otherwise.
        """
        self._sanitizer, self._on_step, self._on_error = sanitizer, on_step, on_error
        self._on_left_out = on_left_out
        self._is_eager = is_eager
        self.is_on = False
        self._is_scaled = False  # a loss of this step was scaled
        self._is_unused = True  # the scaler neither steps nor updates
        self._has_stepped = False  # an optimizer has, in this step
        self._stepping: list[Optimizer] = []
        self._in_scaler = 0  # calls of GradScaler.step under way
        self._wraps: list[tuple[object, str, object, object]] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Install hooks that call `before_step` and `after_step`."""
        self._handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def begin(self) -> None:
        """Install the wrappers, at the beginning of a step."""
        self.is_on, self._is_scaled = True, False
        self._stepping.clear()
        self._wrap(GradScaler, "scale", self._scale)
        self._wrap(GradScaler, "unscale_", self._unscale)
        self._wrap(GradScaler, "step", self._scaler_step)
        self._wrap(GradScaler, "update", self._update)
        self._wrap(torch.autograd, ENGINE, self._backward)
        is_in_autocast = any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
        self._sanitizer.mode.casts.leave()
        if is_in_autocast and torch.is_autocast_cache_enabled():
            self._sanitizer.mode.casts.enter(Place())
        self._wrap(torch.autocast, "__enter__", self._enter_autocast)
        self._wrap(torch, "clear_autocast_cache", self._clear_cache)
        if self._is_eager:
            self._wrap(torch, "compile", self._compile)
            if "torch._dynamo" in sys.modules:
                torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        """Remove the wrappers; one that was itself wrapped since stays, and only passes on."""
        self.is_on = False
        self._stepping.clear()
        for owner, name, original, wrapped in self._wraps:
            if vars(owner).get(name) is wrapped:
                setattr(owner, name, original)
        self._wraps.clear()
        if self._is_eager and "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("default")

    def remove(self) -> None:
        """Remove wrappers and hooks."""
        if self.is_on:
            self.end()
        remove_hooks(self._handles)

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        """Call the sanitizer, if it is armed; an error of it never reaches the loop."""
        if self._sanitizer.is_armed and not self._sanitizer.is_other_thread:
            try:
                call(*arguments)
            except Exception as error:
                self._on_error(error)

    def _wrap(self, owner: object, name: str, around: Callable[..., object]) -> None:
        """Replace a function by a call of `around` with the original before its arguments."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            if not self.is_on:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._wraps.append((owner, name, original, wrapper))

    def _enter_autocast(self, original: Callable[..., object], region: Any) -> object:
        """Note that autocast is entered."""
        entered = original(region)
        if region._enabled and region._cache_enabled:
            self._call(self._note_region)
        return entered

    def _note_region(self) -> None:
        self._sanitizer.mode.casts.enter(place_of_caller())

    def _clear_cache(self, original: Callable[..., object]) -> object:
        """Note that autocast is left."""
        self._call(self._sanitizer.mode.casts.leave)
        return original()

    def _compile(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Compile, and run eagerly: a compiled graph has no operators to observe."""
        compiled = original(*args, **kwargs)
        torch.compiler.set_stance("force_eager")
        return compiled

    def _scale(self, original: Callable[..., object], scaler: Any, outputs: object) -> object:
        if scaler._enabled:
            if self._is_scaled and self._has_stepped and self._is_unused:
                self._step_ends()
            self._is_scaled = True
            if scaler._scale is None and isinstance(outputs, Tensor):
                with self._sanitizer.pause():  # as `scale` does it
                    scaler._lazy_init_scale_growth_tracker(outputs.device)
            self._call(self._sanitizer.loss, outputs, scaler)
        scaled = original(scaler, outputs)
        if scaler._enabled:
            self._call(self._sanitizer.record_scaling, scaled, scaler)
        return scaled

    def _unscale(self, original: Any, scaler: GradScaler, optimizer: object) -> object:
        if scaler._enabled:
            self._call(self._sanitizer.unscaling, optimizer, scaler)
        with self._sanitizer.pause():
            return original(scaler, optimizer)

    def _scaler_step(
        self, original: Any, scaler: GradScaler, optimizer: object, *args: object, **kwargs: object
    ) -> object:
        if scaler._enabled:
            self._call(self._sanitizer.unscaling, optimizer, scaler)
        self._is_unused &= not scaler._enabled
        self._in_scaler += scaler._enabled
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler -= scaler._enabled
            self._call(self._sanitizer.record_step, optimizer)

    def _update(self, original: Any, scaler: GradScaler, *args: object, **kwargs: object) -> object:
        with self._sanitizer.pause():
            result = original(scaler, *args, **kwargs)
        if scaler._enabled:
            self._is_unused = False
            self._step_ends()
        return result

    def _leave_to_torch(self, roots: object) -> None:
        if isinstance(roots, list | tuple):
            leave_to_torch(roots, self._sanitizer.mode)

    def _backward(self, original: Any, roots: object, *args: object, **kwargs: object) -> object:
        sanitizer = self._sanitizer
        self._call(self._end_left_out)
        if kwargs.get("accumulate_grad"):
            self._call(sanitizer.loss, roots)
            self._call(sanitizer.backward_begins, roots, args[0] if args else ())
        else:
            self._call(sanitizer.backward_begins)
        self._call(self._leave_to_torch, roots)
        try:
            return original(roots, *args, **kwargs)
        finally:
            self._call(sanitizer.backward_ends)
            if self._stepping:  # a closure has made its gradients
                self._call(sanitizer.judge, self._stepping[0])

    def _end_left_out(self) -> None:
        if self._sanitizer.is_left_out:
            self._on_left_out()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note that an optimizer is about to step."""
        if not self.is_on:
            return
        has_closure = bool(args and callable(args[0])) or kwargs.get("closure") is not None
        if not has_closure:
            self._call(self._sanitizer.judge, optimizer)
        self._stepping.append(optimizer)

    def after_step(self, optimizer: Optimizer, _args: object = (), _kwargs: object = None) -> None:
        """Note that an optimizer has stepped."""
        if not self.is_on:
            return
        if optimizer in self._stepping:  # inner ones may have raised
            del self._stepping[self._stepping.index(optimizer) :]
        if not (self._stepping or self._in_scaler):
            self._call(self._sanitizer.record_step, optimizer)
            self._has_stepped = True
            if not self._is_scaled:
                self._step_ends()

    def _step_ends(self) -> None:
        self._is_scaled = self._has_stepped = False
        self._on_step()
