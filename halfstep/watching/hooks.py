"""Wrappers of torch functions that observe a training loop without changes to it.

Every step calls these functions, whatever the framework: `GradScaler.scale`, `unscale_` (or
`_check_inf_per_device`, for a fused optimizer without `unscale_`), `step` and `update`; the one
function by which every backward pass enters the engine; the hooks around an optimizer's step; the
functions in which gradients are clipped; the steps of learning-rate schedulers; `Module.eval`.

A wrapper calls a part of the loop before or after the original, with the same objects. It never
iterates, copies or replaces an argument or a return value: an iterator passed to `scale` stays
untouched.
This module imports torch.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import cuda, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.watching.async_host_copy import is_capturing
from halfstep.watching.clip_wrappers import wrap_clips
from halfstep.watching.listener import Guard, Listener, keep_from_compiler
from halfstep.watching.loop import Loop
from halfstep.watching.optimizer_hooks import remove_hooks

ENGINE = "_engine_run_backward"  # of torch.autograd; Tensor.backward and autograd.grad end there


class Hooks:
    """Set of wrappers, active from `arm` to `disarm`."""

    def __init__(self, loop: Loop) -> None:
        """loop: its parts are called by the wrappers."""
        self._loop = loop
        self._shadow_hooks = loop.evidence.armed.hooks
        self._listener = Listener()
        self._schedule_depth = 0
        self._wraps: list[tuple[object, str, object, object]] = []
        self._hooks: list[Any] = []

    def arm(self, guard: Guard) -> None:
        """Install the wrappers, also around ShardedGradScaler's overrides.

        What they call stays out of compiled graphs.
        """
        loop = self._loop
        self._listener.guard = guard
        scalers = loop.scalers
        for function in (
            *(self._listener.call, guard.handle_error, guard.terminate, loop.passes.repeats),
            *(scalers.on_scale, scalers.checked.func, scalers.updating, scalers.on_update),
            *(scalers.on_load, loop.clips.clipping, loop.optimizers.on_step),
        ):
            keep_from_compiler(getattr(function, "__func__", function), with_callees=True)
        self._listener.is_armed = True
        loop.evidence.armed.guard(guard)
        for scaler in (GradScaler, *_find_sharded_scalers()):
            self._wrap_scaler(scaler, "scale", scalers.on_scale)
            self._wrap_scaler(scaler, "unscale_", scalers.unscaled)
            self._wrap_scaler(scaler, "_check_inf_per_device", scalers.checked)
            self._wrap_scaler_step(scaler)
            self._wrap_update(scaler)
            self._wrap_scaler(scaler, "load_state_dict", scalers.on_load)
        self._wrap_loading()
        self._wrap_engine()
        self._wrap_eval()
        for name, wrapper in wrap_clips(self._listener, loop):
            self._replace(clip_grad, name, getattr(clip_grad, name), wrapper)
        self.wrap_schedulers()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def disarm(self) -> None:
        """Remove the wrappers; one that was itself wrapped since stays and calls nothing."""
        self._loop.evidence.armed.stop()  # its wrappers are around these
        self._listener.is_armed = False
        for owner, name, original, wrapped in self._wraps:
            if vars(owner).get(name) is wrapped:
                setattr(owner, name, original)
        self._wraps.clear()
        remove_hooks(self._hooks)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Call nothing meanwhile: passes of a diagnosis are no steps."""
        is_armed, self._listener.is_armed = self._listener.is_armed, False
        try:
            yield
        finally:
            self._listener.is_armed = is_armed

    def wrap_schedulers(self) -> None:
        """Wrap `step` of each scheduler class that defines it and is not wrapped yet."""
        wrapped = {wrap[0] for wrap in self._wraps}
        for owner in _subclasses(LRScheduler):
            if "step" in vars(owner) and owner not in wrapped:
                self._wrap_scheduler(owner)

    def _wrap_scaler(self, owner: type, name: str, after: Callable[..., None]) -> None:
        """Wrap a method of a scaler class, if the class defines it.

        after: called with the method's result and arguments.
        """
        original = vars(owner).get(name)
        if original is None:
            return
        listener, raised = self._listener, self._loop.scalers.on_error
        guard = listener.guard

        @functools.wraps(original)
        def wrapper(this: Any, *args: object, **kwargs: object) -> object:
            if not (listener.is_armed and this._enabled):
                return original(this, *args, **kwargs)
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                listener.call(raised, this, name, error)
                raise
            if cuda._initialized and is_capturing():
                return result
            guard.held += 1
            try:
                after(this, result, *args, **kwargs)
            except Exception as error:
                guard.handle_error(error)
            finally:
                guard.held -= 1
            if guard.is_due and not guard.held:
                guard.terminate()
            return result

        self._put(owner, name, original, wrapper)

    def _wrap_update(self, owner: type) -> None:
        original = vars(owner).get("update")
        if original is None:
            return
        listener, scalers = self._listener, self._loop.scalers
        guard = listener.guard

        @functools.wraps(original)
        def wrapper(this: Any, *args: object, **kwargs: object) -> object:
            if not (listener.is_armed and this._enabled):
                return original(this, *args, **kwargs)
            is_listening = not (cuda._initialized and is_capturing())
            if is_listening:
                guard.held += 1
                try:
                    scalers.updating(this, *args, **kwargs)
                except Exception as error:
                    guard.handle_error(error)
                finally:
                    guard.held -= 1
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                listener.call(scalers.on_error, this, "update", error)
                raise
            if is_listening and listener.is_armed:
                guard.held += 1
                try:
                    scalers.on_update(this, result, *args, **kwargs)
                except Exception as error:
                    guard.handle_error(error)
                finally:
                    guard.held -= 1
            if guard.is_due and not guard.held:
                guard.terminate()
            return result

        self._put(owner, "update", original, wrapper)

    def _wrap_scaler_step(self, owner: type) -> None:
        original = vars(owner).get("step")
        if original is None:
            return
        listener, loop = self._listener, self._loop
        state, scalers, optimizers = loop.state, loop.scalers, loop.optimizers

        @functools.wraps(original)
        def wrapper(this: object, *args: object, **kwargs: object) -> object:
            if not (listener.is_armed and getattr(this, "_enabled", False)):
                return original(this, *args, **kwargs)
            if state.has_pending:
                listener.call(scalers.measure_pending)
            optimizers.scaler_steps += 1
            try:
                return original(this, *args, **kwargs)
            except Exception as error:
                listener.call(scalers.on_error, this, "step", error)
                raise
            finally:
                optimizers.scaler_steps -= 1

        self._put(owner, "step", original, wrapper)

    def _wrap_loading(self) -> None:
        original, listener = Optimizer.load_state_dict, self._listener
        loads = self._loop.scalers.on_load_optimizer

        @functools.wraps(original)
        def wrapper(this: Optimizer, state_dict: dict[str, object]) -> None:
            original(this, state_dict)
            listener.call(loads, this)

        self._put(Optimizer, "load_state_dict", original, wrapper)

    def _wrap_engine(self) -> None:
        original = getattr(torch.autograd, ENGINE)
        listener, loop = self._listener, self._loop
        evidence, passes = loop.evidence, loop.passes

        @functools.wraps(original)
        def wrapper(roots: object, *args: object, **kwargs: object) -> object:
            accumulates = bool(kwargs.get("accumulate_grad"))
            is_examined = evidence.inputs.found is not None
            if not listener.is_armed or (accumulates and not is_examined and passes.repeats(roots)):
                return original(roots, *args, **kwargs)
            listener.call(loop.backward_begins, roots, args, accumulates)
            try:
                return original(roots, *args, **kwargs)
            finally:
                listener.call(loop.backward_ends)

        self._put(torch.autograd, ENGINE, original, wrapper)

    def _wrap_eval(self) -> None:
        original = nn.Module.eval
        listener, begins = self._listener, self._loop.validation_begins

        # The compiler traces it.
        @functools.wraps(original)
        def wrapper(this: nn.Module) -> nn.Module:
            if not torch.compiler.is_compiling():
                listener.call(begins)
            return original(this)

        self._replace(nn.Module, "eval", original, wrapper)

    def _wrap_scheduler(self, owner: type) -> None:
        original = vars(owner)["step"]
        hooks, listener, loop = self, self._listener, self._loop

        @functools.wraps(original)
        def wrapper(this: object, *args: object, **kwargs: object) -> object:
            hooks._schedule_depth += 1
            try:
                result = original(this, *args, **kwargs)
            finally:
                hooks._schedule_depth -= 1
            is_outermost = listener.is_armed and not hooks._schedule_depth
            if is_outermost and not getattr(this, "_is_initial", False):
                listener.call(loop.schedule_steps, this)
            return result

        self._put(owner, "step", original, wrapper)

    def _put(self, owner: object, name: str, original: Any, wrapped: object) -> None:
        keep_from_compiler(wrapped)
        self._replace(owner, name, original, wrapped)

    def _replace(self, owner: object, name: str, original: Any, wrapped: object) -> None:
        setattr(owner, name, wrapped)
        self._wraps.append((owner, name, original, wrapped))

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._shadow_hooks.is_on:
            self._shadow_hooks.before_step(optimizer, args, kwargs)
        if self._loop.optimizers.stepping:
            self._listener.call(self._loop.optimizers.record_nested, optimizer)
        else:
            self._loop.optimizers.stepping.append(optimizer)

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._shadow_hooks.is_on:
            self._shadow_hooks.after_step(optimizer)
        optimizers = self._loop.optimizers
        stepping = optimizers.stepping
        if stepping and stepping[-1] is optimizer:
            stepping.pop()
        elif any(outer is optimizer for outer in stepping):  # inner ones have raised
            while stepping.pop() is not optimizer:
                pass
        is_scalers = optimizers.scaler_steps and id(optimizer) in self._loop.state.row_of
        if is_scalers or not self._listener.is_armed or (cuda._initialized and is_capturing()):
            return
        guard = self._listener.guard
        guard.held += 1
        try:
            optimizers.on_step(optimizer)
        except Exception as error:
            guard.handle_error(error)
        finally:
            guard.held -= 1
        if guard.is_due and not guard.held:
            guard.terminate()

    keep_from_compiler(_before_step)
    keep_from_compiler(_after_step)


def _find_sharded_scalers() -> list[type]:
    """Return FSDP1's scaler, if the script has imported it: the import takes a second."""
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    return [] if module is None else [module.ShardedGradScaler]


def _subclasses(owner: type) -> list[type]:
    classes: list[type] = [owner]
    for parent in classes:
        children: list[type] = parent.__subclasses__()
        classes += [child for child in children if child not in classes]
    return classes
