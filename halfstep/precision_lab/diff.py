"""Precision diff: one batch in two precisions, module by module. This module imports torch."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from halfstep.number_formats import scale as scale_text
from halfstep.precision_lab.call_records import Call
from halfstep.precision_lab.comparison import (
    INITIAL_SCALE,
    LOW,
    Comparison,
    Mix,
    UnsupportedModel,
    check_models,
    gradient_sums,
    whole_errors,
)
from halfstep.precision_lab.error_statistics import (
    Errors,
    Sums,
    bits_of,
    compare,
    errors_of,
    quotient,
    sum_squared_differences,
    together,
)
from halfstep.precision_lab.low_pass import LowPass
from halfstep.precision_lab.module_patterns import ModuleTree
from halfstep.precision_lab.module_survey import Survey
from halfstep.precision_lab.passes import MOST_CALLS
from halfstep.precision_lab.plan_measurement import (
    Bounds,
    Measurement,
    Situation,
    suppress_errors_of_code,
)
from halfstep.precision_lab.plan_result import FP32_COST
from halfstep.precision_lab.plan_search import PrecisionSearch
from halfstep.precision_lab.reference_pass import ReferencePass
from halfstep.precision_lab.report import PrecisionReport
from halfstep.precision_lab.suggestions import (
    LOSS,
    MAX_ERROR,
    MIN_COSINE,
    ROUNDING_UNIT,
    STAYING_SHARE,
    is_within,
    suggest,
)
from halfstep.telemetry.events import (
    PLAN_MODULES,
    PRECISION_ROWS,
    PlanModule,
    PrecisionDiff,
    PrecisionRow,
)

REFERENCES = {torch.float32: "float32", torch.float64: "float64"}
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Where more than half of the gradient's error stays with the suggested modules in fp32.
UNREPAIRED = (
    "With the suggested modules in fp32, the whole gradient is not much better: they cast to half "
    "precision themselves, pass on half-precision inputs, or contribute little to it."
)
LOSS_UNREPAIRED = (
    "(loss): its own operations lose precision, and fp32 around them does not repair the gradient: "
    "they cast to half precision themselves, or their inputs are in it."
)
COMPILED = "Measured without torch.compile, whose fused kernels may round less often."
UNDERFLOW = "Gradients underflow at the loss scale {scale}: a larger one fixes this without fp32."
#: Share of flushed gradients from which a suggestion is also one about the loss scale.
UNDERFLOW_SHARE = 0.01


def precision_diff(
    model: nn.Module,
    batch: object,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    dtype: torch.dtype = torch.float16,
    *,
    scale: float | None = None,
    reference: torch.dtype = torch.float32,
    causes: int = 0,
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
    causes: measure the error of the whole gradient that single modules cause alone, for as many as
    this with the largest local errors; a forward and a backward pass each.
    Raises ValueError for a model or an argument of which no diff can be made.
    """
    return PrecisionReport(
        diff_of(
            (model,),
            lambda: loss_fn(model, batch),
            dtype,
            scale,
            reference,
            given=batch,
            causes=causes,
        )
    )


def diff_of(
    models: tuple[nn.Module, ...],
    closure: Callable[[], Tensor],
    dtype: torch.dtype,
    scale: float | None = None,
    reference: torch.dtype = torch.float32,
    *,
    step: int = 0,
    given: object = None,
    names: Mapping[nn.Module, str] | None = None,
    causes: int = 0,
    is_searched: bool = True,
) -> PrecisionDiff:
    """Return the event of a precision diff.

    closure: returns the loss; called several times.  given: what it reads, which is restored if
    the model overwrites it.  names: of the modules; by default the paths within their model.
    causes: as of `precision_diff`.  is_searched: where the modules with large local errors do not
    explain a gradient beyond the bounds, suggest those of a precision plan, in many passes.
    """
    check_arguments(dtype, scale, reference)
    if not 0 <= causes <= PLAN_MODULES:
        raise ValueError(f"causes = {causes}: must be a number of modules from 0 to {PLAN_MODULES}")
    check_models(models)
    diff = _Diff(models, closure, dtype, reference, given, names, is_searched=is_searched)
    with diff.preserve():
        event = diff.event(step, scale)
        return replace(event, causes=diff.causes(event, causes)) if causes else event


def check_arguments(dtype: object, scale: object, reference: object) -> None:
    """Raise ValueError for an argument that is not allowed."""
    if dtype not in LOW:
        raise ValueError(f"dtype = {dtype}: must be torch.float16 or torch.bfloat16")
    if reference not in REFERENCES:
        raise ValueError(f"reference = {reference}: must be torch.float32 or torch.float64")
    is_number = isinstance(scale, int | float) and math.isfinite(scale) and scale > 0
    if scale is not None and not is_number:
        raise ValueError(f"scale = {scale!r}: must be a finite number greater than 0, or None")


class _Diff(Comparison):
    """A precision diff of some models in this process."""

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        closure: Callable[[], Tensor],
        dtype: torch.dtype,
        reference: torch.dtype,
        given: object,
        own_names: Mapping[nn.Module, str] | None,
        *,
        is_searched: bool,
    ) -> None:
        super().__init__(models, closure, reference, given, own_names, ROUNDING_UNIT[LOW[dtype]])
        floats = {p.dtype for model in models for p in model.parameters() if p.is_floating_point()}
        if wrong := (floats & LOW.keys()) - {dtype}:
            raise UnsupportedModel(
                f"dtype = {dtype}: the model has weights of type {wrong.pop()}; pass their type"
            )
        self._dtype = dtype
        self._is_searched = is_searched and not floats & LOW.keys()
        self._mix = Mix(None if floats == {dtype} else dtype)  # None: it needs no autocast
        self._own_notes = [COMPILED] if self.is_compiled else []  # those before any pass
        self.notes = list(self._own_notes)

    def event(self, step: int, scale: float | None) -> PrecisionDiff:
        """Run all passes; again at a lower scale if the gradients overflow."""
        default = INITIAL_SCALE if self._dtype == torch.float16 else 1.0
        self.setting.scale = default if scale is None else float(scale)
        event = self._event(step)
        if self._dtype == torch.float16 and math.isfinite(float(event.loss)):
            fitting = None
            if not math.isfinite(float(event.error)):
                fitting = self.fitting_scale(self._mix, self.setting.scale)
            if fitting is not None:
                planned = scale_text(self.setting.scale)
                text = f"At the loss scale {planned} the gradients overflow, as a "
                self.notes = [
                    *self._own_notes,
                    f"{text}scaler would find: measured at {scale_text(fitting)}.",
                ]
                self.setting.scale = fitting
                return self._event(step)
        if self.setting.scale < INITIAL_SCALE and any(map(_underflows, event.rows)):
            event.notes.append(UNDERFLOW.format(scale=scale_text(self.setting.scale)))
        return event

    def _event(self, step: int) -> PrecisionDiff:
        setting = self.setting
        reference = ReferencePass(setting)
        with self.one_pass(is_reference=True):
            reference_loss, references = reference.run(self.closure)
        low = LowPass(setting, reference)
        with self.one_pass(), self._autocast():
            loss, gradients = low.run(self.closure, references)
        totals = gradient_sums(gradients, references, setting.scale)
        rows = self._rows(reference, low, references, gradients, totals)
        whole = whole_errors(totals)
        self._note(reference, low, len(rows), whole)
        names, fixed = self._suggest(rows, references, whole)
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
            suggested_error=fixed and fixed.error,
            notes=self.notes,
            rows=rows[:PRECISION_ROWS],
        )

    def _suggest(
        self, rows: list[PrecisionRow], references: Mapping[int, Tensor], whole: Errors
    ) -> tuple[list[str], Errors | None]:
        """Return the modules that should stay in fp32, and the errors with them there.

        The errors are None without modules, and of half-precision weights.
        """
        names = [suggestion.name for suggestion in suggest(rows, LOW[self._dtype])]
        if self._mix.dtype is None:
            return names, None
        fixed = self._repair(names, references) if names else None
        if LOSS in names and fixed is not None:
            others = [name for name in names if name != LOSS]
            without = self._repair(others, references) if others else None
            if not fixed.error < STAYING_SHARE * (without or whole).error:
                names, fixed = others, without
                self.notes.append(LOSS_UNREPAIRED)
        now = fixed or whole
        if self._is_searched and not is_within(now.error, now.cosine):
            planned = list(dict.fromkeys([*names, *self._plan()]))
            after = self._repair(planned, references) if len(planned) > len(names) else now
            is_better = after.error < STAYING_SHARE * now.error
            if is_better or is_within(after.error, after.cosine):
                return planned, after
        if fixed is not None and not fixed.error < whole.error / 2:
            self.notes.append(UNREPAIRED)
        return names, fixed

    def _repair(self, names: Collection[str], references: Mapping[int, Tensor]) -> Errors:
        """Return the errors of the gradient with some modules in fp32."""
        own = {m: torch.float32 for m, name in self.setting.names.items() if name in names}
        mix = Mix(self._dtype, own, is_loss_in_fp32=LOSS in names)
        return self.errors(mix, self.setting.scale, references)

    def _plan(self) -> list[str]:
        """Return the modules that a precision plan of this batch takes out of low precision."""
        with suppress_errors_of_code():
            bounds, scale = Bounds(MAX_ERROR, MIN_COSINE), max(self.setting.scale, 1.0)
            measurement = Measurement([Situation(self)], bounds, FP32_COST, scale)
            return list(PrecisionSearch(measurement, self._dtype).run().state)
        return []

    def causes(self, event: PrecisionDiff, count: int) -> list[PlanModule]:
        """Return the errors of the gradient that modules cause alone, the largest first.

        Of the modules with the largest local errors; of half-precision weights none, as their
        modules cannot be computed in fp32 alone.
        """
        if self._mix.dtype is None:
            return []
        work, survey = Survey(self, None).work, Survey(self, self._dtype)
        local: dict[str, float] = dict.fromkeys(work, 0.0)
        for row in event.rows:
            if row.name in local and row.local is not None:
                local[row.name] = max(local[row.name], float(row.local))
        types = ModuleTree.of(self.setting.names).types
        references = self.reference_gradients()
        operations = sum(module_work.operations for module_work in work.values())
        size = sum(module_work.bytes for module_work in work.values())
        scale = float(event.scale)
        modules = [
            PlanModule(
                role=name,
                names=[name],
                type=types.get(name, ""),
                errors={
                    SHORT[self._dtype]: survey.measure_isolated_error(
                        self, (name,), scale, references
                    )
                },
                operations=work[name].operations / (operations or 1),
                memory=work[name].bytes / (size or 1),
                ms=None,
            )
            for name in sorted(local, key=lambda name: -local[name])[:count]
        ]
        return sorted(modules, key=lambda module: -max(map(float, module.errors.values())))

    def _autocast(self) -> torch.autocast:
        enabled = self._mix.dtype is not None
        return torch.autocast(self.setting.device_type, self._dtype, enabled=enabled)

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
        totals: Mapping[int, Sums],
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
        scale = self.setting.scale
        for key, name in self._parameter_names.items():
            total = totals.get(key)
            if total is None:
                continue
            whole, own = references[key], gradients.get(key)
            local, repair = low.local.get(key), low.repairs.get(key)
            parts = rest = fixed = None
            if local is not None:
                parts = low.local_sums.get(key) or compare([local], [whole])
                own = torch.zeros_like(whole) if own is None else own
                rest = sum_squared_differences([own], [local], scale=scale)
                fixed = None if repair is None else compare([local + repair], [whole])
            if unknown := low.why_unknown(key, parts, whole):
                parts = rest = None
            parameter = self.setting.parameters[key]
            errors = _Parts(total, parts, rest, fixed)
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
                    unknown=unknown,
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
    backward = together(measured.backward + _missing(call.input_gradients))
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


def _missing(gradients: Mapping[int, Tensor]) -> list[Sums]:
    """Return the sums of gradients that only the reference has."""
    sums = (compare([None], [gradient]) for gradient in gradients.values())
    return [part for part in sums if part]
