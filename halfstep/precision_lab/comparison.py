"""One batch in several precisions: passes that start from the same state, and their gradients.

This module imports torch.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep.precision_lab.call_records import Leaves, in_backward, intercept, is_float
from halfstep.precision_lab.dispatch_modes import HALF, EqualOperations
from halfstep.precision_lab.error_statistics import (
    Errors,
    Sums,
    compare,
    errors_of,
    together,
    without_modes,
)
from halfstep.precision_lab.parameter_gradients import check_loss, gradients_of
from halfstep.precision_lab.passes import Setting
from halfstep.precision_lab.preservation import (
    RandomState,
    copy_state,
    no_global_hooks,
    preserve_attributes,
    preserve_tensors,
)
from halfstep.recording.gradients import module_names, parameter_names

INITIAL_SCALE = 65536.0  # as of a new GradScaler
SCALE_STEP = 16.0  # between the loss scales that are tried
LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class UnsupportedModel(ValueError):
    """A model of which no comparison can be made; says what to do."""


class Mix(NamedTuple):
    """The precisions of a pass: autocast, and those of modules with all that is in them."""

    dtype: torch.dtype | None  # of autocast; None: no autocast
    own: Mapping[nn.Module, torch.dtype] = {}  # float32 or bfloat16
    is_loss_in_fp32: bool = False  # the loss function's own operations


class Comparison:
    """The comparison of passes of one batch through some models in this process."""

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        closure: Callable[[], Tensor],
        reference: torch.dtype = torch.float32,
        given: Any = None,
        own_names: Mapping[nn.Module, str] | None = None,
        unit: float = 1.0,
    ) -> None:
        """closure: returns the loss.  given: what it reads.  unit: rounding unit of the format.

        own_names: of the modules; by default the paths within their model.
        """
        self._reference, self.closure = reference, closure
        self.models, self.given = models, given
        self._all = list(dict.fromkeys(m for model in models for m in model.modules()))
        names = dict(own_names or module_names(models))
        recorded = {m: name for m, name in names.items() if not is_wrapper(m)}
        parameters = [p for model in models for p in model.parameters()]
        self._parameter_names = {id(p): name for p, name in parameter_names(models).items()}
        if own_names:
            self._parameter_names = {
                id(p): f"{name}.{own}"
                for module, name in reversed(list(own_names.items()))
                for own, p in module.named_parameters(recurse=False)
            }
        self.devices = sorted({p.device for p in parameters}, key=str)
        self.setting = Setting(
            recorded, parameters[0].device.type, self.devices, reference, unit, 1.0
        )
        self._start = RandomState(self.devices)
        read = [value for value in Leaves(given).flat if isinstance(value, Tensor)]
        self._originals = [*parameters, *read]
        self._gradients = [(p, p.requires_grad, p.grad) for p in parameters]
        self.is_compiled = any(map(_is_compiled, self._all))

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Leave everything as it was."""
        with ExitStack() as stack:
            stack.callback(self._start.restore)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(no_global_hooks())
            if "torch._dynamo" in sys.modules:  # also for compiled functions that a model calls
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @contextmanager
    def one_pass(self, *, is_reference: bool = False, is_plain: bool = False) -> Iterator[None]:
        """Start a pass from the same state, and restore it; inside of `preserve`.

        is_plain: without the intercepted operations, which take time on the host; only if passes
        so far have overwritten neither parameters nor the batch.
        """
        self._start.restore()
        dtype = self._reference if is_reference else None
        with ExitStack() as stack:
            stack.callback(self._restore_parameters)
            stack.enter_context(preserve_attributes(self._all))
            stack.enter_context(copy_state(self._all, dtype))
            stack.enter_context(preserve_tensors(self._originals, self.setting.kept))
            stack.callback(torch.clear_autocast_cache)
            if not is_reference and (not is_plain or self.setting.kept.has_copied):
                stack.enter_context(EqualOperations(self.setting.kept.before_write))
            yield

    def _restore_parameters(self) -> None:
        for parameter, requires_grad, gradient in self._gradients:
            parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def reference_gradients(self) -> dict[int, Tensor]:
        """Return the reference's gradients by the id of the parameter."""
        with self.one_pass(is_reference=True), self.in_reference() as casts:
            loss = self.closure()
            check_loss(loss)
            parameters = {key: casts.get(key, p) for key, p in self.setting.parameters.items()}
            return gradients_of(loss, parameters)

    @contextmanager
    def in_reference(self) -> Iterator[dict[int, Any]]:
        """Compute in the reference's precision; yield the cast parameters by the original's id."""

        def call(module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
            args, kwargs = cast_floats((args, kwargs), self._reference)
            return run(*args, **kwargs)

        setting = self.setting
        with setting.in_reference(setting.modules) as casts, intercept(call):
            yield casts

    def errors(self, mix: Mix, scale: float, references: Mapping[int, Tensor]) -> Errors:
        """Return the errors of the whole gradient in a mix of precisions."""
        with self.one_pass():
            return self.errors_in(self.compute_mixed(mix), scale, references)

    def errors_in(
        self,
        region: AbstractContextManager[None],
        scale: float,
        references: Mapping[int, Tensor],
    ) -> Errors:
        """Return the errors of the whole gradient of a pass; inside of `one_pass`.

        Without a finite loss they are infinite: gradients may be finite all the same.
        """
        with region:
            loss = self.closure()
            gradients = self.compute_scaled_gradients(loss, scale)
        if bool(loss.isfinite()):
            return whole_errors(gradient_sums(gradients, references, scale))
        return Errors(math.inf, math.inf, math.nan, 0.0, 0.0)

    def fitting_scale(self, mix: Mix, below: float) -> float | None:
        """Return the scale that a scaler would come to; None if the gradients overflow at 1 too."""
        scale = below / SCALE_STEP
        while scale >= 1:
            with self.one_pass(), self.compute_mixed(mix):
                gradients = self.compute_scaled_gradients(self.closure(), scale)
            if all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
                return scale
            scale /= SCALE_STEP
        return None

    def compute_scaled_gradients(self, loss: Tensor, scale: float) -> dict[int, Tensor]:
        """Return the gradients of a loss times a scale."""
        factor = torch.full_like(loss, scale, dtype=torch.float32)
        return gradients_of(loss * factor, self.setting.parameters)

    @contextmanager
    def compute_mixed(self, mix: Mix) -> Iterator[None]:
        """Compute in a mix of precisions, as modules.fp32 and modules.bf16 of a run do."""
        device_type, names, depth = self.setting.device_type, self.setting.names, 0
        outermost: set[nn.Module] = set()  # modules that the loss function calls

        def call(module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
            nonlocal depth
            is_outermost = depth == 0 and mix.is_loss_in_fp32 and module in names
            if is_outermost and in_backward():  # activation checkpointing repeats a forward
                is_outermost = module in outermost
            elif is_outermost:
                outermost.add(module)
            depth += 1
            try:
                with ExitStack() as stack:
                    if is_outermost:
                        stack.enter_context(torch.autocast(device_type, mix.dtype))
                    own = mix.own.get(module)
                    if own is not None and torch.is_autocast_enabled(device_type):
                        args, kwargs = cast_floats((args, kwargs), own, HALF)
                        stack.enter_context(region(device_type, own))
                    result = run(*args, **kwargs)
                return cast_floats(result, torch.float32, HALF) if is_outermost else result
            finally:
                depth -= 1

        is_on = mix.dtype is not None and not mix.is_loss_in_fp32
        dtype = mix.dtype or torch.bfloat16  # ignored while autocast is disabled
        with intercept(call), torch.autocast(device_type, dtype, enabled=is_on):
            yield


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise UnsupportedModel for models whose state a pass would change."""
    modules = [module for model in models for module in model.modules()]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not any(p.requires_grad for module in modules for p in module.parameters(recurse=False)):
        raise UnsupportedModel("the model has no parameter that requires a gradient")
    for module in modules:
        # Between a forward pass without gradients and the next one, FSDP2's parameters are whole.
        is_fsdp2 = fsdp is not None and isinstance(module, fsdp.FSDPModule)
        if is_fsdp2 or any(hasattr(p, "to_local") for p in module.parameters(recurse=False)):
            raise UnsupportedModel(
                f"{type(module).__name__} has sharded parameters (FSDP2 or tensor parallelism): a "
                "diff needs whole ones. Run it on an unsharded copy of the model"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedModel(
                "FullyShardedDataParallel shards its parameters, and a diff needs whole ones: run "
                "it on an unsharded copy of the model"
            )
        if isinstance(module, DataParallel):
            raise UnsupportedModel("DataParallel copies its module: pass model.module instead")


def region(device_type: str, dtype: torch.dtype) -> torch.autocast:
    """Return an autocast region of a module's own precision; without autocast for float32.

    Without the cache: it stores one cast per weight, and a tied weight may also be cast to another
    type.
    """
    is_low = dtype in HALF
    low = dtype if is_low else torch.bfloat16
    return torch.autocast(device_type, low, enabled=is_low, cache_enabled=False)


def cast_floats(tree: object, dtype: torch.dtype, only: Sequence[torch.dtype] = ()) -> Any:
    """Return a tree of arguments with its floating tensors in a dtype; only those of some types."""
    leaves = Leaves(tree)
    return leaves.rebuild(
        [
            value.to(dtype) if is_float(value) and (not only or value.dtype in only) else value
            for value in leaves.flat
        ]
    )


def whole_errors(sums: Mapping[int, Sums]) -> Errors:
    """Return the errors of the gradient of all parameters together, from those of each."""
    whole = together(list(sums.values()))
    if whole is None:
        raise UnsupportedModel("no parameter of the model has a gradient")
    return errors_of(whole)


def gradient_sums(
    gradients: Mapping[int, Tensor], references: Mapping[int, Tensor], scale: float
) -> dict[int, Sums]:
    """Compare the scaled gradients of parameters, each by its id, with the reference's."""
    sums = {}
    with without_modes():
        for key, reference in references.items():
            if compared := compare([gradients.get(key)], [reference], scale=scale):
                sums[key] = compared
    return sums


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only wraps another: of torch.compile or data parallelism."""
    return hasattr(module, "_orig_mod") or isinstance(module, DistributedDataParallel)


def _is_compiled(module: nn.Module) -> bool:
    is_forward = hasattr(module.forward, "_torchdynamo_orig_callable")
    return is_forward or hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
