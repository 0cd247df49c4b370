"""Precision diff: one batch in two precisions, module by module. This module imports torch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep.monitor.gradients import module_names, parameter_names
from halfstep.precision_lab.call_records import Call, Leaves, intercepted, is_float
from halfstep.precision_lab.dispatch_modes import EqualOperations
from halfstep.precision_lab.error_statistics import (
    Errors,
    Sums,
    bits_of,
    compare,
    errors_of,
    quotient,
)
from halfstep.precision_lab.passes import (
    MOST_CALLS,
    LowPass,
    ReferencePass,
    Setting,
    gradients_of,
)
from halfstep.precision_lab.preservation import (
    RandomState,
    copied_state,
    no_global_hooks,
    preserved_attributes,
    preserved_tensors,
)
from halfstep.precision_lab.report import PrecisionReport
from halfstep.precision_lab.suggestions import LOSS, ROUNDING_UNIT, suggest
from halfstep.telemetry.events import PRECISION_ROWS, PrecisionDiff, PrecisionRow

INITIAL_SCALE = 65536.0  # as of a new GradScaler
LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
REFERENCES = {torch.float32: "float32", torch.float64: "float64"}
#: Where more than half of the gradient's error stays with the suggested modules in fp32.
UNREPAIRED = (
    "With the suggested modules in fp32 the whole gradient is not much better: they cast to half "
    "precision themselves, pass on what they get in half precision, or contribute little to it."
)
UNDERFLOW = (
    "Gradients underflow at the loss scale {scale:g}: a larger one repairs that without fp32."
)
#: Share of flushed gradients from which a suggestion is also one about the loss scale.
UNDERFLOW_SHARE = 0.01


class UnsupportedModel(ValueError):
    """A model of which no precision diff can be made; says what to do."""


def precision_diff(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    dtype: torch.dtype = torch.float16,
    *,
    scale: float | None = None,
    reference: torch.dtype = torch.float32,
) -> PrecisionReport:
    """Compare one batch's forward and backward pass in low precision with a reference.

    The model, its buffers and gradients, the random generators and so the next training step stay
    as they are, to the bit. No optimizer steps.

    loss_fn: called with the model and the batch, several times; returns the loss.
    dtype: of autocast, float16 or bfloat16. A model whose weights all have this type is run
    without autocast, and its reference has fp32 copies of them.
    scale: the loss scale; by default 1 for bfloat16, and 65,536 for float16. It is lowered, as by
    a scaler, if the gradients of float16 overflow.
    reference: float32, computed without TF32, or float64.
    Raises ValueError for a model or an argument of which no diff can be made.
    """
    return PrecisionReport(
        diff_of((model,), lambda: loss_fn(model, batch), dtype, scale, reference, given=batch)
    )


def diff_of(
    models: tuple[nn.Module, ...],
    closure: Callable[[], Tensor],
    dtype: torch.dtype,
    scale: float | None = None,
    reference: torch.dtype = torch.float32,
    *,
    step: int = 0,
    given: Any = None,
    names: Mapping[nn.Module, str] | None = None,
) -> PrecisionDiff:
    """Return the event of a precision diff.

    closure: returns the loss; called several times.  given: what it reads, which is restored if
    the model overwrites it.  names: of the modules; by default the paths within their model.
    """
    check_arguments(dtype, scale, reference)
    check_models(models)
    diff = _Diff(models, closure, dtype, reference, given, names)
    with diff.preserved():
        return diff.event(step, scale)


def check_arguments(dtype: object, scale: object, reference: object) -> None:
    """Raise ValueError for an argument that is not allowed."""
    if dtype not in LOW:
        raise ValueError(f"dtype = {dtype}: must be torch.float16 or torch.bfloat16")
    if reference not in REFERENCES:
        raise ValueError(f"reference = {reference}: must be torch.float32 or torch.float64")
    is_number = isinstance(scale, int | float) and math.isfinite(scale) and scale > 0
    if scale is not None and not is_number:
        raise ValueError(f"scale = {scale!r}: must be a finite number greater than 0, or None")


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise UnsupportedModel for models whose state a pass would change."""
    modules = [module for model in models for module in model.modules()]
    if not any(p.requires_grad for module in modules for p in module.parameters(recurse=False)):
        raise UnsupportedModel("the model has no parameter that requires a gradient")
    for module in modules:
        if any(hasattr(p, "to_local") for p in module.parameters(recurse=False)):
            raise UnsupportedModel(
                f"{type(module).__name__} has sharded parameters (FSDP2 or tensor parallelism): a "
                "diff needs whole ones. Run it on an unsharded copy of the model"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedModel(
                "FullyShardedDataParallel keeps its parameters in shards: a diff needs whole ones. "
                "Run it on an unsharded copy of the model"
            )
        if isinstance(module, DataParallel):
            raise UnsupportedModel("DataParallel copies its module: pass model.module instead")


class _Diff:
    """A precision diff of some models in this process."""

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        closure: Callable[[], Tensor],
        dtype: torch.dtype,
        reference: torch.dtype,
        given: Any,
        own_names: Mapping[nn.Module, str] | None,
    ) -> None:
        self._dtype, self._reference, self._closure = dtype, reference, closure
        self._models = models
        self._all = list(dict.fromkeys(m for model in models for m in model.modules()))
        names = dict(own_names or module_names(models))
        self._wrappers = {m for m in self._all if is_wrapper(m)}
        recorded = {m: name for m, name in names.items() if m not in self._wrappers}
        parameters = [p for model in models for p in model.parameters()]
        self._parameter_names = {id(p): name for p, name in parameter_names(models).items()}
        if own_names:
            self._parameter_names = {
                id(p): f"{name}.{own}"
                for module, name in reversed(list(own_names.items()))
                for own, p in module.named_parameters(recurse=False)
            }
        device = parameters[0].device
        devices = sorted({p.device for p in parameters}, key=str)
        floats = {p.dtype for p in parameters if p.is_floating_point()}
        self._has_autocast = floats != {dtype}
        if wrong := (floats & LOW.keys()) - {dtype}:
            raise UnsupportedModel(
                f"dtype = {dtype}: the model has weights of type {wrong.pop()}; pass their type"
            )
        unit = ROUNDING_UNIT[LOW[dtype]]
        self._setting = Setting(recorded, device.type, devices, reference, unit, 1.0)
        self._start = RandomState(devices)
        given = [value for value in Leaves(given).flat if isinstance(value, Tensor)]
        self._originals = [*parameters, *given]
        self._gradients = [(p, p.requires_grad, p.grad) for p in parameters]
        self.notes: list[str] = []
        self._own_notes: list[str] = []  # those before any pass

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave everything as it was."""
        with ExitStack() as stack:
            stack.callback(self._start.restore)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(no_global_hooks())
            if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in self._all):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.notes.append(
                    "Measured without torch.compile, whose fused kernels may round less often."
                )
            self._own_notes = list(self.notes)
            yield

    @contextmanager
    def _pass(self, *, is_reference: bool = False) -> Iterator[None]:
        """Start a pass from the same state, and restore it."""
        self._start.restore()
        dtype = self._reference if is_reference else None
        with ExitStack() as stack:
            stack.callback(self._restore_parameters)
            stack.enter_context(preserved_attributes(self._all))
            stack.enter_context(copied_state(self._all, dtype))
            stack.enter_context(preserved_tensors(self._originals, self._setting.kept))
            stack.callback(torch.clear_autocast_cache)
            if not is_reference:
                stack.enter_context(EqualOperations(self._setting.kept.before_write))
                if self._has_autocast:
                    device_type = self._setting.device_type
                    stack.enter_context(torch.autocast(device_type, self._dtype))
            yield

    def _restore_parameters(self) -> None:
        for parameter, requires_grad, gradient in self._gradients:
            parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def event(self, step: int, scale: float | None) -> PrecisionDiff:
        """Run all passes; again at a lower scale if the gradients overflow."""
        default = INITIAL_SCALE if self._dtype == torch.float16 else 1.0
        self._setting.scale = default if scale is None else float(scale)
        event = self._event(step)
        if self._dtype == torch.float16 and math.isfinite(float(event.loss)):
            fitting = None if math.isfinite(float(event.error)) else self._fitting_scale()
            if fitting is not None:
                text = f"At the loss scale {self._setting.scale:g} the gradients overflow, as a "
                self.notes = [
                    *self._own_notes,
                    f"{text}scaler would find: measured at {fitting:g}.",
                ]
                self._setting.scale = fitting
                return self._event(step)
        if self._setting.scale < INITIAL_SCALE and any(map(_underflows, event.rows)):
            event.notes.append(UNDERFLOW.format(scale=self._setting.scale))
        return event

    def _event(self, step: int) -> PrecisionDiff:
        setting = self._setting
        reference = ReferencePass(setting)
        with self._pass(is_reference=True):
            reference_loss, references = reference.run(self._closure)
        low = LowPass(setting, reference)
        with self._pass():
            loss, gradients = low.run(self._closure, references)
        rows = self._rows(reference, low, references, gradients)
        whole = _whole(gradients, references, setting.scale)
        suggestions = suggest(rows, LOW[self._dtype])
        names = [each.name for each in suggestions]
        fixed = self._error_with(names, references) if names and self._has_autocast else None
        self._note(reference, low, len(rows), whole)
        if fixed is not None and not fixed < whole.error / 2:
            self.notes.append(UNREPAIRED)
        return PrecisionDiff(
            step=step,
            dtype=LOW[self._dtype],  # type: ignore[arg-type]
            reference=REFERENCES[self._reference],  # type: ignore[arg-type]
            scale=setting.scale,
            loss=float(loss),
            reference_loss=float(reference_loss),
            error=whole.error,
            cosine=whole.cosine,
            suggested=names,
            suggested_error=fixed,
            notes=self.notes,
            rows=rows[:PRECISION_ROWS],
        )

    def _fitting_scale(self) -> float | None:
        """Return the scale that a scaler would come to; None if the gradients overflow at 1 too."""
        scale = self._setting.scale / 16
        while scale >= 1:
            with self._pass(), intercepted(self._plain):
                gradients = self._scaled_gradients(self._closure(), scale)
            if all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
                return scale
            scale /= 16
        return None

    def _scaled_gradients(self, loss: Tensor, scale: float) -> dict[int, Tensor]:
        factor = torch.full_like(loss, scale, dtype=torch.float32)
        return gradients_of(loss * factor, self._setting.parameters)

    def _error_with(self, names: Sequence[str], references: Mapping[int, Tensor]) -> float:
        """Return the whole gradient's error with modules in fp32."""
        setting, depth = self._setting, 0
        chosen = {m for m, name in setting.names.items() if name in names}
        region = partial(torch.autocast, setting.device_type, self._dtype)

        def called(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal depth
            is_outermost = depth == 0 and LOSS in names and module in setting.names
            depth += 1
            try:
                if module in chosen:
                    args, kwargs = _in_fp32((args, kwargs))
                    with region(enabled=False):
                        return run(*args, **kwargs)
                if is_outermost:
                    with region():
                        return _in_fp32(run(*args, **kwargs))
                return run(*args, **kwargs)
            finally:
                depth -= 1

        with self._pass(), intercepted(called), region(enabled=LOSS not in names):
            gradients = self._scaled_gradients(self._closure(), setting.scale)
        return _whole(gradients, references, setting.scale).error

    def _plain(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def _note(self, reference: ReferencePass, low: LowPass, rows: int, whole: Errors) -> None:
        counts = (
            (reference.left_out, f"calls of modules beyond the first {MOST_CALLS} of each"),
            (low.unmatched, "calls of modules that the reference does not make"),
            (max(0, rows - PRECISION_ROWS), "rows"),
        )
        self.notes += [f"{count} {what} are left out." for count, what in counts if count]
        if not math.isfinite(whole.error):
            self.notes.append(
                "The gradient is not finite in low precision: a scaler would skip this step."
            )

    def _rows(
        self,
        reference: ReferencePass,
        low: LowPass,
        references: Mapping[int, Tensor],
        gradients: Mapping[int, Tensor],
    ) -> list[PrecisionRow]:
        rows = [
            row
            for call in reference.in_order
            if call.measured.is_called
            for row in _rows_of_call(call, self._reference)
        ]
        users: dict[int, dict[str, None]] = {}
        for call in reference.in_order:
            for key in call.parameters:
                users.setdefault(key, {})[call.name] = None
        scale = self._setting.scale
        for key, name in self._parameter_names.items():
            whole = references.get(key)
            if whole is None:
                continue
            local, repair = low.local.get(key), low.repairs.get(key)
            own = gradients.get(key)
            unscaled = None if own is None else own.to(self._reference) / scale
            total = compare([unscaled], [whole])
            if total is None:
                continue
            parts = None if local is None else compare([local], [whole])
            rest = None if local is None else compare([unscaled], [local])
            fixed = None
            if local is not None and repair is not None:
                fixed = compare([local + repair], [whole])
            unknown = [
                call.measured.why_unknown
                for call in reference.in_order
                if key in call.parameters and call.measured.why_unknown
            ]
            parameter = self._setting.parameters[key]
            errors = _Parts(
                total,
                None if unknown else parts,
                None if rest is None or unknown else rest.numbers[2],
                fixed,
            )
            dtypes = {call.dtype for call in reference.in_order if key in call.parameters}
            half = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes]
            dtype = next(iter(half), parameter.dtype)
            row = errors.row(self._reference, name, type(parameter).__name__, dtype)
            rows.append(
                replace(
                    row,
                    call=0,
                    direction="parameter",
                    used_by=list(users.get(key, ())),
                    unknown=next(iter(unknown), None),
                )
            )
        return rows


class _Parts(NamedTuple):
    """Error of one row and its parts, on the device."""

    total: Sums
    local: Sums | None
    inherited: Tensor | None  # squared norm
    fp32: Sums | None

    def row(
        self, reference: torch.dtype, name: str, type_name: str, dtype: torch.dtype | None
    ) -> PrecisionRow:
        """Return a row of the first call, forward; the host waits for the device."""
        errors = errors_of(self.total)
        local = None if self.local is None else errors_of(self.local)
        inherited = None
        if self.inherited is not None and local is not None:
            inherited = quotient(float(self.inherited), float(self.total.numbers[0]))
        return PrecisionRow(
            name=name,
            type=type_name,
            call=1,
            direction="forward",
            dtype=str(dtype or "").removeprefix("torch."),
            elements=self.total.elements,
            error=errors.error,
            largest=errors.largest,
            cosine=errors.cosine,
            flushed=errors.flushed,
            saturated=errors.saturated,
            bits=bits_of(errors.error, reference),
            local=local and local.error,
            inherited=inherited,
            local_flushed=local and local.flushed,
            local_saturated=local and local.saturated,
            local_fp32=None if self.fp32 is None else errors_of(self.fp32).error,
        )


def _rows_of_call(call: Call, reference: torch.dtype) -> Iterator[PrecisionRow]:
    measured = call.measured
    type_name = "" if call.module is None else type(call.module).__name__
    why = measured.why_unknown
    local = (measured.local_forward, measured.local_backward) if why is None else (None, None)
    backward = _together(measured.backward + _missing(call.input_gradients))
    if measured.forward is not None:
        rest = measured.forward_inherited
        parts = _Parts(measured.forward, local[0], rest, measured.fp32_forward)
        row = parts.row(reference, call.name, type_name, call.dtype)
        yield replace(row, call=call.number, unknown=why)
    if backward is not None:
        squares = measured.backward_inherited
        rest = torch.stack(squares).sum() if squares else None
        parts = _Parts(backward, local[1], rest, measured.fp32_backward)
        row = parts.row(reference, call.name, type_name, call.dtype)
        yield replace(row, call=call.number, direction="backward", unknown=why)


def _underflows(row: PrecisionRow) -> bool:
    """Return whether a suggested module's local error is one of flushed gradients in fp16."""
    is_suspect = row.local_fp32 is not None and row.direction == "backward"
    flushed = float(row.local_flushed or 0)
    return is_suspect and row.dtype == "float16" and flushed > UNDERFLOW_SHARE


def _in_fp32(tree: Any) -> Any:
    leaves = Leaves(tree)
    half = (is_float(value) and value.dtype in LOW for value in leaves.flat)
    return leaves.rebuild([v.float() if h else v for v, h in zip(leaves.flat, half, strict=True)])


def _missing(gradients: Mapping[int, Tensor]) -> list[Sums]:
    """Return the sums of gradients that only the reference has."""
    sums = (compare([None], [gradient]) for gradient in gradients.values())
    return [each for each in sums if each]


def _together(sums: Sequence[Sums]) -> Sums | None:
    if not sums:
        return None
    device = sums[0].numbers.device
    whole = torch.stack([each.numbers.to(device) for each in sums])
    total = whole.sum(0)
    total[3] = whole[:, 3].max()
    return Sums(total, sum(each.elements for each in sums))


def _whole(
    gradients: Mapping[int, Tensor], references: Mapping[int, Tensor], scale: float
) -> Errors:
    """Return the errors of the gradient of all parameters together."""
    sums = []
    for key, reference in references.items():
        own = gradients.get(key)
        unscaled = None if own is None else own.to(reference.dtype) / scale
        sums.append(compare([unscaled], [reference]))
    whole = _together([each for each in sums if each])
    if whole is None:
        raise UnsupportedModel("no parameter of the model has a gradient")
    return errors_of(whole)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only wraps another: of torch.compile or data parallelism."""
    return hasattr(module, "_orig_mod") or isinstance(module, DistributedDataParallel)
