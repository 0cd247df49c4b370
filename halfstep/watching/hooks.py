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
from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support

from halfstep.evidence.collector import Collector
from halfstep.watching.async_host_copy import is_capturing
from halfstep.watching.backward_passes import BackwardPasses

ENGINE = "_engine_run_backward"  # of torch.autograd; Tensor.backward and autograd.grad end there
CLIP = "_clip_grads_with_norm_"  # of torch.nn.utils.clip_grad
NORM = "_get_total_norm"  # of clip_grad, before a clip by norm
#: Listener methods that wrappers call with lines of their own, not by `Hooks._call`.
CALLED_INLINE = (
    *("scaled", "unscaled", "checked", "updating", "updated", "loaded"),
    *("clipping", "stepped"),
)
EXACT = (torch.float32, torch.float64)  # dtypes of gradients whose norms are not rounded
GROUP = "_group_tensors_by_device_and_dtype"  # of clip_grad: clip_grad_value_ calls it, too


class Guard(Protocol):
    """Keeps exceptions and signals out of the training while the listener is called."""

    held: int  # calls under way; above 0 a signal is deferred and sets is_due
    is_due: bool

    def failed(self, error: Exception) -> None:
        """Handle an exception of the listener."""

    def terminate(self) -> None:
        """Handle the deferred signal."""


class Listener(Protocol):
    """Interface that the wrappers call."""

    def scaled(self, scaler: GradScaler, result: Any, outputs: Any) -> None:
        """Handle the return of `scaler.scale(outputs)`."""

    #: Handle the return of `scaler.unscale_(optimizer)`, and an inf check that left gradients
    #: multiplied by the scale, with scaler, result and optimizer.
    unscaled: functools.partial[None]
    checked: functools.partial[None]

    passes: BackwardPasses
    evidence: Collector
    scaler_steps: int  # calls of GradScaler.step under way, of enabled scalers
    has_pending: bool  # gradients wait for their clip

    def measure_pending(self) -> None:
        """Handle a call of GradScaler.step before it steps its optimizer."""

    def raised(self, scaler: GradScaler, method: str, error: Exception) -> None:
        """Handle an exception from a method of the scaler."""

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Handle `scaler.update(new_scale)` before it changes the scale and clears the flags."""

    def updated(self, scaler: GradScaler, result: Any, new_scale: Any = None) -> None:
        """Handle the return of `scaler.update(new_scale)`."""

    def loaded(self, scaler: GradScaler, result: Any, *state: Any, **states: Any) -> None:
        """Handle the return of `scaler.load_state_dict`."""

    def backward_begins(self, roots: Any, arguments: tuple[Any, ...], accumulates: bool) -> None:
        """Handle the start of a backward pass. arguments: the engine's, after roots."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass, whether it returned or raised."""

    stepping: list[Optimizer]  # optimizers inside `step`, outermost first

    def nested(self, optimizer: Optimizer) -> None:
        """Handle the start of an optimizer's step within another one's."""

    rows: dict[int, Any]  # by an optimizer's id, of those that scalers step

    def stepped(self, optimizer: Optimizer) -> None:
        """Handle the end of an optimizer's step that no scaler made."""

    #: Gradients that are about to be clipped, and their norms, if the clip has computed them.
    norms_of_clip: tuple[Sequence[Tensor], Sequence[Tensor]] | None

    def clipping(self, parameters: Any, max_norm: Any, total_norm: Any) -> None:
        """Handle gradients before they are clipped. parameters: the list that torch made."""

    def clipped(self) -> None:
        """Handle the end of a clip, which changes marks of gradients, if there are any."""

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

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._is_armed = False
        self._schedule_depth = 0
        self._wraps: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[Any] = []

    def _call(self, call: Callable[..., None], *given: Any, **named: Any) -> None:
        """Call the listener. Wrappers of each step's calls have the same lines in them."""
        if not self._is_armed or is_capturing():
            return
        guard = self._guard
        guard.held += 1
        try:
            call(*given, **named)
        except Exception as error:
            guard.failed(error)
        finally:  # KeyboardInterrupt propagates
            guard.held -= 1
        if guard.is_due and not guard.held:
            guard.terminate()

    def arm(self, guard: Guard) -> None:
        """Install the wrappers, also around ShardedGradScaler's overrides.

        The listener's calls stay out of compiled graphs.
        """
        listener, self._guard = self._listener, guard
        methods = (getattr(listener, name) for name in CALLED_INLINE)
        repeats = listener.passes.repeats
        for function in (self._call, guard.failed, guard.terminate, repeats, *methods):
            function = getattr(function, "func", function)  # of a partial
            _keep_from_compiler(getattr(function, "__func__", function), with_callees=True)
        self._is_armed = True
        for scaler in (GradScaler, *_sharded_scalers()):
            self._wrap_scaler(scaler, "scale", listener.scaled)
            self._wrap_scaler(scaler, "unscale_", listener.unscaled)
            self._wrap_scaler(scaler, "_check_inf_per_device", listener.checked)
            self._wrap_scaler_step(scaler)
            self._wrap_update(scaler)
            self._wrap_scaler(scaler, "load_state_dict", listener.loaded)
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

    def _wrap_scaler(self, owner: type, name: str, after: Callable[..., None]) -> None:
        """Wrap a method of a scaler class, if the class defines it.

        after: called with the method's result and arguments.
        """
        original = vars(owner).get(name)
        if original is None:
            return
        guard, hooks, raised = self._guard, self, self._listener.raised

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not (hooks._is_armed and this._enabled):
                return original(this, *args, **kwargs)
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                hooks._call(raised, this, name, error)
                raise
            if is_capturing():
                return result
            guard.held += 1
            try:
                after(this, result, *args, **kwargs)
            except Exception as error:
                guard.failed(error)
            finally:
                guard.held -= 1
            if guard.is_due and not guard.held:
                guard.terminate()
            return result

        self._put(owner, name, original, wrapped)

    def _wrap_update(self, owner: type) -> None:
        original = vars(owner).get("update")
        if original is None:
            return
        guard, hooks, listener = self._guard, self, self._listener

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not (hooks._is_armed and this._enabled):
                return original(this, *args, **kwargs)
            is_listening = not is_capturing()
            if is_listening:
                guard.held += 1
                try:
                    listener.updating(this, *args, **kwargs)
                except Exception as error:
                    guard.failed(error)
                finally:
                    guard.held -= 1
            try:
                result = original(this, *args, **kwargs)
            except Exception as error:
                hooks._call(listener.raised, this, "update", error)
                raise
            if is_listening and hooks._is_armed:
                guard.held += 1
                try:
                    listener.updated(this, result, *args, **kwargs)
                except Exception as error:
                    guard.failed(error)
                finally:
                    guard.held -= 1
            if guard.is_due and not guard.held:
                guard.terminate()
            return result

        self._put(owner, "update", original, wrapped)

    def _wrap_scaler_step(self, owner: type) -> None:
        original = vars(owner).get("step")
        if original is None:
            return
        hooks, listener = self, self._listener

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not (hooks._is_armed and getattr(this, "_enabled", False)):
                return original(this, *args, **kwargs)
            if listener.has_pending:
                hooks._call(listener.measure_pending)
            listener.scaler_steps += 1
            try:
                return original(this, *args, **kwargs)
            except Exception as error:
                hooks._call(listener.raised, this, "step", error)
                raise
            finally:
                listener.scaler_steps -= 1

        self._put(owner, "step", original, wrapped)

    def _wrap_engine(self) -> None:
        original = getattr(torch.autograd, ENGINE)
        hooks, listener, evidence = self, self._listener, self._listener.evidence

        @functools.wraps(original)
        def wrapped(roots: Any, *args: Any, **kwargs: Any) -> Any:
            accumulates = bool(kwargs.get("accumulate_grad"))
            is_examined = evidence.origin.is_armed or evidence.inputs is not None
            if not hooks._is_armed or (
                accumulates and not is_examined and listener.passes.repeats(roots)
            ):
                return original(roots, *args, **kwargs)
            hooks._call(listener.backward_begins, roots, args, accumulates)
            try:
                return original(roots, *args, **kwargs)
            finally:
                hooks._call(listener.backward_ends)

        self._put(torch.autograd, ENGINE, original, wrapped)

    def _wrap_clip(self) -> None:
        guard, hooks, listener = self._guard, self, self._listener
        clip, group = getattr(clip_grad, CLIP), getattr(clip_grad, GROUP)
        total = getattr(clip_grad, NORM)

        # The compiler traces these three: a graph may contain a clip.
        @functools.wraps(total)
        def norm(
            tensors: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            """Return torch's total norm, and pass on the norms that it consists of."""
            listener.norms_of_clip = None
            is_plain = norm_type == 2.0 and foreach is not False and not error_if_nonfinite
            if (
                torch.compiler.is_compiling()
                or not (hooks._is_armed and is_plain and isinstance(tensors, list))
                or is_capturing()
            ):
                return total(tensors, norm_type, error_if_nonfinite, foreach)
            try:
                # As torch does for tensors of one kind. Norms of half precision are rounded.
                [((device, dtype), ([own], _))] = group([tensors]).items()
                if dtype in EXACT and has_foreach_support(own, device):
                    norms = torch._foreach_norm(own, 2.0)
                    result = torch.linalg.vector_norm(torch.stack(norms), 2.0)
                    listener.norms_of_clip = tensors, norms
                    return result
            except Exception:  # torch raises it, too
                return total(tensors, norm_type, error_if_nonfinite, foreach)
            return total(tensors, norm_type, error_if_nonfinite, foreach)

        @functools.wraps(clip)
        def clips(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not hooks._is_armed:
                return clip(parameters, max_norm, *args, **kwargs)
            if not isinstance(parameters, Tensor | list | tuple):
                return clip(parameters, max_norm, *args, **kwargs)
            if not is_capturing():
                guard.held += 1
                try:
                    listener.clipping(parameters, max_norm, args[0] if args else None)
                except Exception as error:
                    guard.failed(error)
                finally:
                    guard.held -= 1
                if guard.is_due and not guard.held:
                    guard.terminate()
            result = clip(parameters, max_norm, *args, **kwargs)
            if listener.passes.plain is None:
                hooks._call(listener.clipped)
            return result

        @functools.wraps(group)
        def groups(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not hooks._is_armed:
                return group(tensors, *args, **kwargs)
            if sys._getframe(1).f_code.co_name == "clip_grad_value_":
                hooks._call(listener.clipping_values, tensors[0])
            return group(tensors, *args, **kwargs)

        self._replace(clip_grad, NORM, total, norm)
        self._replace(clip_grad, CLIP, clip, clips)
        self._replace(clip_grad, GROUP, group, groups)

    def _wrap_scheduler(self, owner: type) -> None:
        original = vars(owner)["step"]
        hooks, listener = self, self._listener

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            hooks._schedule_depth += 1
            try:
                result = original(this, *args, **kwargs)
            finally:
                hooks._schedule_depth -= 1
            is_outermost = hooks._is_armed and not hooks._schedule_depth
            if is_outermost and not getattr(this, "_is_initial", False):
                hooks._call(listener.schedule_steps, this)
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
            self._call(self._listener.nested, optimizer)
        else:
            self._listener.stepping.append(optimizer)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        listener = self._listener
        stepping = listener.stepping
        while stepping and stepping.pop() is not optimizer:
            pass
        is_scalers = listener.scaler_steps and id(optimizer) in listener.rows
        if is_scalers or not self._is_armed or is_capturing():
            return
        guard = self._guard
        guard.held += 1
        try:
            listener.stepped(optimizer)
        except Exception as error:
            guard.failed(error)
        finally:
            guard.held -= 1
        if guard.is_due and not guard.held:
            guard.terminate()

    _keep_from_compiler(_before_step)
    _keep_from_compiler(_after_step)


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
