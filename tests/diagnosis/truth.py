"""Recorders of what a loop does, independent of `watch`; they wait at each call.

`observe` runs a loop with recorders around torch's public methods and returns what they saw;
`in_fp32` is the counterfactual, without half precision; PROOFS states for each cause what must be
seen for a loop to have it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.diagnosis.registry import Loop
from tests.diagnosis.unwatched import Unwatched, run

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Pass:
    """A backward pass: its loss, and the gradients that were not finite before and after it.

    carried: gradients that the last step of their optimizer used were still there before it.
    """

    loss: float
    before: set[int]
    nonfinite: set[int]
    received: set[int]
    carried: bool


@dataclass
class OptimizerStep:
    """A call of Optimizer.step, by a scaler or directly, and whether weights changed."""

    optimizer: int
    by_scaler: bool
    is_finite: bool
    norm: float
    without: list[int]
    parameters: int


@dataclass
class Update:
    """A call of GradScaler.update: the scale before and after, and each optimizer's flag."""

    scaler: int
    before: float
    after: float
    found: dict[int, float]
    stages: dict[int, OptState]


@dataclass
class Truth:
    """The observations in order."""

    error: str = ""
    passes: list[Pass] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    clips: list[OptState] = field(default_factory=list)
    scalers: int = 0
    loads: int = 0
    hand_set: int = 0
    scheduled: list[bool] = field(default_factory=list)  # the attempt before it was skipped
    rates_after_skips: int = 0  # changes of a rate, by whatever, between a skip and the next step
    inputs_nonfinite: int = 0
    forwards: int = 0
    logged_nonfinite: list[str] = field(default_factory=list)  # at last
    infinite_by_design: list[str] = field(default_factory=list)  # buffers, from the start
    buffers_nonfinite: list[str] = field(default_factory=list)
    weights_nonfinite: list[str] = field(default_factory=list)
    moved: int = 0  # parameters that ended elsewhere than they began
    unscaled: int = 0  # passes from a loss that is not a multiple of one given to scale
    autocasts: set[torch.dtype] = field(default_factory=set)
    half_parameters: int = 0
    small_eps: int = 0
    bounded: float = 0.0  # the share of norm x scale that is its median, over two scales or more
    last_loss: float = math.nan

    @property
    def skipped(self) -> int:
        """Return the number of updates with non-finite gradients of an optimizer."""
        return sum(any(each.found.values()) for each in self.updates)

    @property
    def nonfinite_losses(self) -> int:
        return sum(not math.isfinite(each.loss) for each in self.passes)

    @property
    def finite_loss_nonfinite_gradient(self) -> int:
        """Return the number of passes from a finite loss and clean gradients to non-finite ones."""
        return sum(
            math.isfinite(each.loss) and not each.before and bool(each.nonfinite)
            for each in self.passes
        )


class _Recorder:
    """A wrapper of torch's methods while a loop runs."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self._parameters: dict[int, nn.Parameter] = {}
        self._scale_after: dict[int, float] = {}
        self._scalers: dict[int, GradScaler] = {}
        self._inside: list[int] = []
        self._found: dict[int, bool] = {}
        self._rates: dict[int, list[float]] = {}  # by optimizer, at its last step
        self._products: list[tuple[float, float]] = []
        self._depth = 0
        self._used: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by optimizer: its last gradient

    def watch(self, *modules: nn.Module) -> None:
        for module in modules:
            module.register_forward_pre_hook(self._on_enter, with_kwargs=True)
            bad = [n for n, b in module.named_buffers() if not b.isfinite().all()]
            self.truth.infinite_by_design += bad
            for parameter in module.parameters():
                self._parameters[id(parameter)] = parameter

    def _on_enter(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.truth.forwards += 1
        given = [*inputs, *named.values()]
        floats = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        first = floats[:2]
        self.truth.inputs_nonfinite += any(not x.isfinite().all() for x in first)

    def _bad(self) -> set[int]:
        return {
            key
            for key, p in self._parameters.items()
            if p.grad is not None and not _values(p.grad).isfinite().all()
        }

    def _is_carried(self) -> bool:
        """Return whether gradients equal the last step's, except for the loss scale."""
        return any(
            p.grad is not None and bool(used.any()) and _are_parallel(_values(p.grad), used)
            for p, used in self._used.values()
        )

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def engine(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return original(roots, *args, **kwargs)
            before, carried = self._bad(), self._is_carried()
            self._depth += 1
            try:
                result = original(roots, *args, **kwargs)
            finally:
                self._depth -= 1
            scale = max(
                (s._scale.item() for s in self._scalers.values() if _has_scale(s)), default=1
            )
            loss = sum(float(_values(root.detach()).float().sum()) for root in roots) / scale
            received = {key for key, p in self._parameters.items() if p.grad is not None}
            self.truth.unscaled += self._has_scaled and not any(map(self._is_scaled, roots))
            self.truth.passes.append(Pass(loss, before, self._bad(), received, carried))
            self.truth.last_loss = loss
            return result

        return engine

    _has_scaled = False

    @staticmethod
    def _is_scaled(root: Tensor) -> bool:
        """Return whether a root was computed from a scaler's result."""
        waiting, seen = [root.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.metadata.get("is_scaled"):
                return True
            waiting += [below for below, _ in node.next_functions]
        return False

    def scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._scalers[id(scaler)] = scaler  # kept, so that no id is used again
                self.truth.scalers = len(self._scalers)
            result = original(scaler, outputs)
            if isinstance(result, Tensor) and scaler.is_enabled() and result.grad_fn is not None:
                self._has_scaled = True
                result.grad_fn.metadata["is_scaled"] = True
            return result

        return scale

    def autocast_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: torch.autocast) -> Any:
            if context._enabled and context.fast_dtype is not None:
                self.truth.autocasts.add(context.fast_dtype)
            return original(context)

        return enter

    def scaler_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(scaler: GradScaler, state: Any) -> None:
            original(scaler, state)
            self.truth.loads += 1
            self._scale_after.pop(id(scaler), None)

        return load

    def scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if self._found.get(id(optimizer)) and self._rates[id(optimizer)] != rates:
                self.truth.rates_after_skips += 1
            self._rates[id(optimizer)] = rates
            self._inside.append(id(optimizer))
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._inside.pop()
                flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
                self._found[id(optimizer)] = any(bool(flag) for flag in flags.values())

        return step

    def scaler_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: GradScaler, new_scale: Any = None) -> None:
            if not scaler.is_enabled():
                original(scaler, new_scale)
                return
            states = dict(scaler._per_optimizer_states)
            found = {
                key: sum(float(flag) for flag in state["found_inf_per_device"].values())
                for key, state in states.items()
            }
            stages = {key: state["stage"] for key, state in states.items()}
            before = float(scaler.get_scale())
            expected = self._scale_after.get(id(scaler), before)
            self.truth.hand_set += before != expected
            original(scaler, new_scale)
            after = float(scaler.get_scale())
            self._scale_after[id(scaler)] = after
            self.truth.updates.append(Update(id(scaler), before, after, found, stages))

        return update

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            own = {id(p) for p in parameters}
            for optimizer in Unwatched.optimizers:
                if own & {id(p) for g in optimizer.param_groups for p in g["params"]}:
                    # The scaler that scaled last, if this loop has one.
                    for scaler in list(self._scalers.values())[-1:]:
                        states = scaler._per_optimizer_states
                        is_known = id(optimizer) in states
                        stage = states[id(optimizer)]["stage"] if is_known else OptState.READY
                        self.truth.clips.append(stage)
            return original(parameters, *args, **kwargs)

        return clip

    def optimizer_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [_values(p.grad).float().norm() for p in parameters if p.grad is not None]
        norm = float(torch.stack(norms).norm()) if norms else math.nan
        by_scaler = bool(self._inside)
        if norms:
            first = next(p for p in parameters if p.grad is not None)
            self._used[id(optimizer)] = first, _values(first.grad).clone()
        self.truth.steps.append(
            OptimizerStep(
                optimizer=id(optimizer),
                by_scaler=by_scaler,
                is_finite=math.isfinite(norm) or not norms,
                norm=norm,
                without=[i for i, p in enumerate(parameters) if p.grad is None and p.requires_grad],
                parameters=sum(p.requires_grad for p in parameters),
            )
        )
        half = [p for p in parameters if p.dtype == torch.float16]
        self.truth.half_parameters = max(self.truth.half_parameters, len(half))
        eps = [group["eps"] for group in optimizer.param_groups if "eps" in group]
        if half and any(float(torch.tensor(each, dtype=torch.float16)) == 0 for each in eps):
            self.truth.small_eps += 1
        scales = [s._scale.item() for s in self._scalers.values() if _has_scale(s)]
        if by_scaler and len(scales) == 1 and math.isfinite(norm) and norm:
            is_scaled = getattr(optimizer, "grad_scale", None) is not None  # fused
            self._products.append((scales[0], norm * (1 if is_scaled else scales[0])))

    def scheduler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            if self._depth_of_schedulers or getattr(scheduler, "_is_initial", False):
                return original(scheduler, *args, **kwargs)
            self._depth_of_schedulers += 1
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._depth_of_schedulers -= 1
                optimizer = getattr(scheduler, "optimizer", None)
                self.truth.scheduled.append(self._found.get(id(optimizer), False))

        return step

    _depth_of_schedulers = 0

    def end(self) -> None:
        products = self._products
        if len({scale for scale, _ in products}) > 1 and len(products) >= 20:
            values = sorted(product for _, product in products)
            median = values[len(values) // 2]
            near = [abs(value - median) <= 1e-3 * median for value in values]
            self.truth.bounded = sum(near) / len(near)


def observe(loop: Loop, *, fp32: bool = False) -> Truth:
    """Run a loop and return what happened in it. fp32: with half precision turned off."""
    truth = Truth()
    recorder = _Recorder(truth)
    with ExitStack() as stack:
        if fp32:
            stack.enter_context(in_fp32())
        _wrap(stack, torch.autograd, "_engine_run_backward", recorder.backward)
        _wrap(stack, GradScaler, "scale", recorder.scale)
        _wrap(stack, torch.autocast, "__enter__", recorder.autocast_enter)
        _wrap(stack, GradScaler, "load_state_dict", recorder.scaler_load)
        _wrap(stack, GradScaler, "step", recorder.scaler_step)
        _wrap(stack, GradScaler, "update", recorder.scaler_update)
        _wrap(stack, clip_grad, "_clip_grads_with_norm_", recorder.clip)
        _wrap(stack, nn.utils, "clip_grad_value_", recorder.clip)
        for scheduler in _scheduler_classes(LRScheduler):
            _wrap(stack, scheduler, "step", recorder.scheduler_step)
        hook = register_optimizer_step_pre_hook(recorder.optimizer_step)
        stack.callback(hook.remove)
        watch = Unwatched(on_watch=recorder.watch)
        ended = run(loop, watch)
    truth.error = ended.error
    truth.logged_nonfinite = [n for n, v in dict(watch.logged).items() if not math.isfinite(v)]
    truth.buffers_nonfinite = [
        name
        for name in ended.nonfinite("buffer")
        if not name.endswith(tuple(f" {each}" for each in truth.infinite_by_design))
    ]
    truth.weights_nonfinite = ended.nonfinite("weight")
    truth.moved = ended.moved
    recorder.end()
    return truth


@contextmanager
def in_fp32() -> Iterator[None]:
    """Turn autocast and conversions to half precision off."""
    with ExitStack() as stack:
        enter = torch.autocast.__enter__

        def disable(self: torch.autocast) -> Any:
            was, self._enabled = self._enabled, False  # one that decorates is entered again
            try:
                return enter(self)
            finally:
                self._enabled = was

        stack.enter_context(patch.object(torch.autocast, "__enter__", disable))
        for owner in (nn.Module, Tensor):
            for name in ("half", "bfloat16"):
                stack.enter_context(patch.object(owner, name, lambda self: self))
        yield


def _wrap(stack: ExitStack, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    if name in vars(owner):
        stack.enter_context(patch.object(owner, name, wrap(vars(owner)[name])))


def _scheduler_classes(base: type) -> list[type]:
    found = [base] if "step" in vars(base) else []
    for each in base.__subclasses__():
        found += [one for one in _scheduler_classes(each) if one not in found]
    return found


def _values(tensor: Tensor) -> Tensor:
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _has_scale(scaler: GradScaler) -> bool:
    return scaler._scale is not None


# ---- What proves a cause -------------------------------------------------------------------------


def _forward_overflow(truth: Truth, fp32: Truth) -> bool:
    return truth.nonfinite_losses > 0 and fp32.nonfinite_losses == 0 and not truth.inputs_nonfinite


def _backward_overflow(truth: Truth, fp32: Truth) -> bool:
    finite = truth.finite_loss_nonfinite_gradient
    return finite > 0 and fp32.finite_loss_nonfinite_gradient == 0 and not truth.nonfinite_losses


def _singular_gradient(truth: Truth, fp32: Truth) -> bool:
    both = truth.finite_loss_nonfinite_gradient, fp32.finite_loss_nonfinite_gradient
    return min(both) > 0


def _undefined_forward(truth: Truth, fp32: Truth) -> bool:
    return min(truth.nonfinite_losses, fp32.nonfinite_losses) > 0 and not truth.inputs_nonfinite


def _loss_not_scaled(truth: Truth, _: Truth) -> bool:
    return truth.unscaled >= 20 or "_scale is None" in truth.error


def _scaler_call_order(truth: Truth, _: Truth) -> bool:
    return "has already been called" in truth.error or "is being called after" in truth.error


def _gradients_not_cleared(truth: Truth, _: Truth) -> bool:
    stale = [each for each in truth.passes if each.before]
    return (len(stale) > 10 and truth.skipped > 10) or sum(e.carried for e in truth.passes) > 10


def _scaler_not_restored(truth: Truth, _: Truth) -> bool:
    return (truth.scalers > 1 and truth.loads == 0) or truth.hand_set > 0


def _scaled_gradients_clipped(truth: Truth, _: Truth) -> bool:
    return OptState.READY in truth.clips or truth.bounded > 0.95


def _step_outside_scaler(truth: Truth, _: Truth) -> bool:
    return truth.scalers > 0 and any(not each.by_scaler for each in truth.steps)


def _step_left_out(truth: Truth, _: Truth) -> bool:
    return any(OptState.UNSCALED in each.stages.values() for each in truth.updates)


def _no_gradient(truth: Truth, _: Truth) -> bool:
    never = [set(each.without) for each in truth.steps]
    by_optimizer: dict[int, set[int]] = {}
    for step, without in zip(truth.steps, never, strict=True):
        by_optimizer.setdefault(step.optimizer, without).intersection_update(without)
    return any(by_optimizer.values())


def _zero_gradients(truth: Truth, _: Truth) -> bool:
    by_optimizer: dict[int, list[float]] = {}
    for step in truth.steps:
        by_optimizer.setdefault(step.optimizer, []).append(step.norm)
    return any(len(each) >= 20 and not any(each[-20:]) for each in by_optimizer.values())


def _no_optimizer_step(truth: Truth, _: Truth) -> bool:
    return len(truth.passes) >= 20 and not truth.steps and truth.moved > 0


def _nonfinite_buffers(truth: Truth, _: Truth) -> bool:
    return bool(truth.buffers_nonfinite) and not truth.weights_nonfinite


def _nonfinite_inputs(truth: Truth, _: Truth) -> bool:
    return truth.inputs_nonfinite > 0 and truth.nonfinite_losses > 0


def _nonfinite_without_scaler(truth: Truth, _: Truth) -> bool:
    bad = any(each.nonfinite or not math.isfinite(each.loss) for each in truth.passes)
    return bad and truth.scalers == 0 and not truth.inputs_nonfinite


def _adam_eps_underflow(truth: Truth, _: Truth) -> bool:
    first = next((i for i, e in enumerate(truth.passes) if e.nonfinite or e.loss != e.loss), None)
    return (
        truth.small_eps > 0
        and truth.half_parameters > 0
        and bool(truth.weights_nonfinite)
        and first != 0
    )


def _scaler_without_fp16(truth: Truth, _: Truth) -> bool:
    is_fp16 = torch.float16 in truth.autocasts or truth.half_parameters
    return truth.scalers > 0 and bool(truth.updates) and not is_fp16


def _fp16_gradients(truth: Truth, _: Truth) -> bool:
    return "Attempting to unscale FP16 gradients" in truth.error


def _schedule_in_skipped_steps(truth: Truth, _: Truth) -> bool:
    return max(sum(truth.scheduled), truth.rates_after_skips) >= 3


def _metric_nonfinite(truth: Truth, _: Truth) -> bool:
    return bool(truth.logged_nonfinite)


def _no_inf_checks(truth: Truth, _: Truth) -> bool:
    return "No inf checks were recorded" in truth.error


PROOFS: dict[str, Callable[[Truth, Truth], bool]] = {
    "forward_overflow": _forward_overflow,
    "backward_overflow": _backward_overflow,
    "singular_gradient": _singular_gradient,
    "undefined_forward": _undefined_forward,
    "loss_not_scaled": _loss_not_scaled,
    "scaler_call_order": _scaler_call_order,
    "gradients_not_cleared": _gradients_not_cleared,
    "scaler_not_restored": _scaler_not_restored,
    "scaled_gradients_clipped": _scaled_gradients_clipped,
    "step_outside_scaler": _step_outside_scaler,
    "step_left_out": _step_left_out,
    "no_gradient": _no_gradient,
    "zero_gradients": _zero_gradients,
    "no_optimizer_step": _no_optimizer_step,
    "nonfinite_buffers": _nonfinite_buffers,
    "nonfinite_inputs": _nonfinite_inputs,
    "nonfinite_without_scaler": _nonfinite_without_scaler,
    "adam_eps_underflow": _adam_eps_underflow,
    "scaler_without_fp16": _scaler_without_fp16,
    "fp16_gradients": _fp16_gradients,
    "schedule_in_skipped_steps": _schedule_in_skipped_steps,
    "metric_nonfinite": _metric_nonfinite,
    "no_inf_checks": _no_inf_checks,
}


def _are_parallel(a: Tensor, b: Tensor) -> bool:
    a, b = a.float() / a.float().norm(), b.float() / b.float().norm()
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4)


def is_healthy(truth: Truth) -> list[str]:
    """Return reasons against a loop's health; none if it is healthy."""
    against = [
        (truth.error, "it raises"),
        (not truth.moved, "no weight moved"),
        (truth.weights_nonfinite, "weights are not finite"),
        (truth.buffers_nonfinite, "buffers are not finite"),
        (truth.logged_nonfinite, "a metric is not finite"),
        (truth.nonfinite_losses, "a loss is not finite"),
        (any(not e.is_finite and not e.by_scaler for e in truth.steps), "a bad step was applied"),
        (any(e.before for e in truth.passes) and truth.skipped > 2, "gradients are not cleared"),
        (_schedule_in_skipped_steps(truth, truth), "the schedule runs ahead"),
    ]
    return [words for holds, words in against if holds]
