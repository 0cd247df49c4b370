"""Wrappers of torch functions that observe a training loop without changes to it.

Every step calls these functions, whatever the framework: `GradScaler.scale`, `unscale_` (or
`_check_inf_per_device`, for a fused optimizer without `unscale_`), `step` and `update`; the one
function by which every backward pass enters the engine; the hooks around an optimizer's step; the
functions in which gradients are clipped; the steps of learning-rate schedulers.

A wrapper calls the listener before or after the original, with the same objects. It never iterates,
copies or replaces an argument or a return value: an iterator passed to `scale` stays untouched.
This module imports torch.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.monitor.async_host_copy import is_capturing
from halfstep.monitor.usual_steps import UsualSteps

#: Calls a function, and keeps its exceptions out of the training.
Guard = Callable[..., None]
ENGINE = "_engine_run_backward"  # of torch.autograd; Tensor.backward and autograd.grad end there
CLIP = "_clip_grads_with_norm_"  # of torch.nn.utils.clip_grad
GROUP = "_group_tensors_by_device_and_dtype"  # of clip_grad: clip_grad_value_ calls it, too
#: Listener methods that are called without the guard: they must not raise.
UNGUARDED = ("repeats", "optimizer_ends")
#: The same of `UsualSteps`: each returns whether the listener's method need not be called.
USUAL = ("scaled", "begins", "checked", "unscaled", "clips", "updating", "updated")


class Listener(Protocol):
    """Interface that the wrappers call."""

    usual: UsualSteps  # called first

    def scaled(self, scaler: GradScaler, result: Any, outputs: Any) -> None:
        """Handle the return of `scaler.scale(outputs)`."""

    def unscaled(self, scaler: GradScaler, result: Any, optimizer: Optimizer) -> None:
        """Handle the return of `scaler.unscale_(optimizer)`."""

    def checked(self, scaler: GradScaler, result: Any, optimizer: Optimizer) -> None:
        """Handle an inf check that left gradients multiplied by the scale."""

    scaler_steps: int  # calls of GradScaler.step under way, of enabled scalers

    def raised(self, scaler: GradScaler, method: str, error: Exception) -> None:
        """Handle an exception from a method of the scaler."""

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Handle `scaler.update(new_scale)` before it changes the scale and clears the flags."""

    def updated(self, scaler: GradScaler, result: Any, new_scale: Any = None) -> None:
        """Handle the return of `scaler.update(new_scale)`."""

    def loaded(self, scaler: GradScaler, result: Any, *state: Any, **states: Any) -> None:
        """Handle the return of `scaler.load_state_dict`."""

    def repeats(self, roots: Any) -> bool:
        """Record a backward pass like all recent ones; return False to have it examined."""

    def backward_begins(self, roots: Any, arguments: tuple[Any, ...], accumulates: bool) -> None:
        """Handle the start of a backward pass. arguments: the engine's, after roots."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass, whether it returned or raised."""

    stepping: list[Optimizer]  # optimizers inside `step`, outermost first

    def nested(self, optimizer: Optimizer) -> None:
        """Handle the start of an optimizer's step within another one's."""

    def optimizer_ends(self, optimizer: Optimizer) -> bool:
        """Remove the optimizer from `stepping`; return whether to call `stepped`."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Handle the end of an optimizer's step that no scaler made."""

    def clipping(self, parameters: Any, max_norm: Any) -> None:
        """Handle gradients before they are clipped. parameters: the list that torch made."""

    def clipped(self) -> None:
        """Handle the end of a clip."""

    def clipping_values(self, gradients: Sequence[Tensor]) -> None:
        """Handle gradients before their elements are clipped."""

    def schedule_steps(self, scheduler: LRScheduler) -> None:
        """Handle the end of a scheduler's outermost `step`."""


def _keep_from_compiler(function: Any, *, with_callees: bool = False) -> None:
    """Break the graph at this function, like torch.compiler.disable, whose import is slow."""
    function._torchdynamo_disable = True
    beyond = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, beyond)
    set_code_exec_strategy(function.__code__, strategy)


class Hooks:
    """Set of wrappers, active from `arm` to `disarm`."""

    def __init__(self, listener: Listener, guard: Guard) -> None:
        """Keep the listener's calls out of compiled graphs.

        guard: calls the listener, and keeps its errors out of the training loop.
        """

        def unless_capturing(call: Callable[..., None], *given: Any, **named: Any) -> None:
            if not is_capturing():
                call(*given, **named)

        def guarded(call: Callable[..., None], *given: Any, **named: Any) -> None:
            guard(unless_capturing, call, *given, **named)

        unguarded = [getattr(listener, name) for name in UNGUARDED]
        for function in (
            guard,
            guarded,
            unless_capturing,
            *unguarded,
            *(getattr(listener.usual, name) for name in USUAL),
        ):
            _keep_from_compiler(getattr(function, "__func__", function), with_callees=True)
        self._guard, self._listener = guarded, listener
        self._is_armed = False
        self._schedule_depth = 0
        self._wraps: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[Any] = []

    def arm(self) -> None:
        """Install the wrappers, also around ShardedGradScaler's overrides."""
        self._is_armed = True
        listener, usual = self._listener, self._listener.usual
        for scaler in (GradScaler, *_sharded_scalers()):
            self._wrap_scaler(scaler, "scale", usual.scaled, listener.scaled)
            self._wrap_scaler(scaler, "unscale_", usual.unscaled, listener.unscaled)
            self._wrap_scaler(scaler, "_check_inf_per_device", usual.checked, listener.checked)
            self._wrap_scaler_step(scaler)
            self._wrap_update(scaler)
            self._wrap_scaler(scaler, "load_state_dict", _never, listener.loaded)
        self._wrap_engine()
        self._wrap_clip()
        self.wrap_schedulers()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def disarm(self) -> None:
        """Remove the wrappers; one that was itself wrapped since stays and calls nothing."""
        self._is_armed = False
        for owner, name, original, wrapped in self._wraps:
            if vars(owner).get(name) is wrapped:
                setattr(owner, name, original)
        self._wraps.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Call nothing meanwhile: passes of a diagnosis are no steps."""
        is_armed, self._is_armed = self._is_armed, False
        try:
            yield
        finally:
            self._is_armed = is_armed

    def wrap_schedulers(self) -> None:
        """Wrap `step` of each scheduler class that defines it and is not wrapped yet."""
        wrapped = {wrap[0] for wrap in self._wraps}
        for owner in _subclasses(LRScheduler):
            if "step" in vars(owner) and owner not in wrapped:
                self._wrap_scheduler(owner)

    def _wrap_scaler(
        self, owner: type, name: str, usual: Callable[..., bool], after: Callable[..., None]
    ) -> None:
        """Wrap a method of a scaler class, if the class defines it.

        usual, after: called with the method's result and arguments; after unless usual returns
        True.
        """
        original = vars(owner).get(name)
        if original is None:
            return
        guard, hooks, raised = self._guard, self, self._listener.raised

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooks._is_armed:
                return original(this, *args, **kwargs)
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                guard(raised, this, name, error)
                raise
            if kwargs or not usual(this, result, *args):
                guard(after, this, result, *args, **kwargs)
            return result

        self._put(owner, name, original, wrapped)

    def _wrap_update(self, owner: type) -> None:
        original = vars(owner).get("update")
        if original is None:
            return
        guard, hooks, listener, usual = self._guard, self, self._listener, self._listener.usual

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooks._is_armed:
                return original(this, *args, **kwargs)
            if args or kwargs or not usual.updating(this):
                guard(listener.updating, this, *args, **kwargs)
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                guard(listener.raised, this, "update", error)
                raise
            if not usual.updated(this):
                guard(listener.updated, this, result, *args, **kwargs)
            return result

        self._put(owner, "update", original, wrapped)

    def _wrap_scaler_step(self, owner: type) -> None:
        original = vars(owner).get("step")
        if original is None:
            return
        guard, hooks, listener = self._guard, self, self._listener

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not (hooks._is_armed and getattr(this, "_enabled", False)):
                return original(this, *args, **kwargs)
            listener.scaler_steps += 1
            try:
                return original(this, *args, **kwargs)
            except Exception as error:
                guard(listener.raised, this, "step", error)
                raise
            finally:
                listener.scaler_steps -= 1

        self._put(owner, "step", original, wrapped)

    def _wrap_engine(self) -> None:
        original = getattr(torch.autograd, ENGINE)
        guard, hooks, listener = self._guard, self, self._listener
        begins = listener.usual.begins

        @functools.wraps(original)
        def wrapped(roots: Any, *args: Any, **kwargs: Any) -> Any:
            accumulates = bool(kwargs.get("accumulate_grad"))
            if not hooks._is_armed or (accumulates and (begins(roots) or listener.repeats(roots))):
                return original(roots, *args, **kwargs)
            guard(listener.backward_begins, roots, args, accumulates)
            try:
                return original(roots, *args, **kwargs)
            finally:
                guard(listener.backward_ends)

        self._put(torch.autograd, ENGINE, original, wrapped)

    def _wrap_clip(self) -> None:
        guard, hooks, listener = self._guard, self, self._listener
        clip, group = getattr(clip_grad, CLIP), getattr(clip_grad, GROUP)

        # The compiler traces these two: a graph may contain a clip.
        @functools.wraps(clip)
        def clips(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not hooks._is_armed:
                return clip(parameters, max_norm, *args, **kwargs)
            if not isinstance(parameters, Tensor | list | tuple) or listener.usual.clips():
                return clip(parameters, max_norm, *args, **kwargs)
            guard(listener.clipping, parameters, max_norm)
            result = clip(parameters, max_norm, *args, **kwargs)
            guard(listener.clipped)
            return result

        @functools.wraps(group)
        def groups(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not hooks._is_armed:
                return group(tensors, *args, **kwargs)
            caller = sys._getframe(1).f_code.co_name
            if caller == "clip_grad_value_" and not listener.usual.clips():
                guard(listener.clipping_values, tensors[0])
            return group(tensors, *args, **kwargs)

        self._replace(clip_grad, CLIP, clip, clips)
        self._replace(clip_grad, GROUP, group, groups)

    def _wrap_scheduler(self, owner: type) -> None:
        original = vars(owner)["step"]
        guard, hooks, listener = self._guard, self, self._listener

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            hooks._schedule_depth += 1
            try:
                result = original(this, *args, **kwargs)
            finally:
                hooks._schedule_depth -= 1
            is_outermost = hooks._is_armed and not hooks._schedule_depth
            if is_outermost and not getattr(this, "_is_initial", False):
                guard(listener.schedule_steps, this)
            return result

        self._put(owner, "step", original, wrapped)

    def _put(self, owner: Any, name: str, original: Any, wrapped: Any) -> None:
        _keep_from_compiler(wrapped)
        self._replace(owner, name, original, wrapped)

    def _replace(self, owner: Any, name: str, original: Any, wrapped: Any) -> None:
        setattr(owner, name, wrapped)
        self._wraps.append((owner, name, original, wrapped))

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._listener.stepping:
            self._guard(self._listener.nested, optimizer)
        else:
            self._listener.stepping.append(optimizer)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._listener.optimizer_ends(optimizer):
            self._guard(self._listener.stepped, optimizer)

    _keep_from_compiler(_before_step)
    _keep_from_compiler(_after_step)


def _never(*_arguments: Any) -> bool:
    return False


def _sharded_scalers() -> list[type]:
    """Return FSDP1's scaler, if the script has imported it: the import takes a second."""
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    return [] if module is None else [module.ShardedGradScaler]


def _subclasses(owner: type) -> list[type]:
    classes: list[type] = [owner]
    for parent in classes:
        children: list[type] = parent.__subclasses__()
        classes += [child for child in children if child not in classes]
    return classes
