"""Precision plan: the fastest mix of precisions within a bound of the gradient's error.

This module imports torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.number_formats import number
from halfstep.precision_lab.comparison import (
    INITIAL_SCALE,
    LOW,
    Comparison,
    UnsupportedModel,
    check_models,
)
from halfstep.precision_lab.diff import COMPILED, diff_of
from halfstep.precision_lab.module_patterns import wildcard
from halfstep.precision_lab.module_survey import Work
from halfstep.precision_lab.plan_measurement import (
    PRECISIONS,
    Bounds,
    Candidate,
    Measurement,
    Situation,
)
from halfstep.precision_lab.plan_result import FP32_COST, PlanModule, PlanPoint, PrecisionPlan
from halfstep.precision_lab.plan_search import PrecisionSearch
from halfstep.precision_lab.preservation import RandomState
from halfstep.precision_lab.suggestions import MAX_ERROR, MIN_COSINE, suggest

MOST_BATCHES = 16
MODULES_SHOWN = 1000


def precision_plan(
    model: nn.Module,
    batches: Iterable[object],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    max_error: float = MAX_ERROR,
    min_cosine: float = MIN_COSINE,
    fp32_cost: float = FP32_COST,
    scale: float = INITIAL_SCALE,
) -> PrecisionPlan:
    """Search the fastest mix of fp32, bf16 and fp16 whose gradient is close to that of fp32.

    The model, its buffers and gradients, and the random generators stay as they are, to the bit.
    On a GPU, times are measured there by CUDA events; elsewhere they follow from the operations of
    matrix products, convolutions and attention.

    batches: 1 to 16, as the training has them.  loss_fn: called with the model and a batch, often.
    max_error, min_cosine: bounds of the relative L2 error and the cosine similarity of the gradient
    of all parameters together, on each batch.
    fp32_cost: how much longer an operation takes in fp32 than in half precision, where nothing is
    measured.  scale: the loss scale of fp16 to start from.
    Raises ValueError for a model or an argument of which no plan can be made.
    """
    random = RandomState(sorted({p.device for p in model.parameters()}, key=str))
    try:
        taken = list(islice(batches, MOST_BATCHES + 1))
    finally:
        random.restore()
    if not 1 <= len(taken) <= MOST_BATCHES:
        count = f"more than {MOST_BATCHES} batches" if taken else "no batch"
        raise ValueError(f"batches has {count}: pass 1 to {MOST_BATCHES}")
    check_models([model])

    def situation(batch: object) -> Situation:
        return Situation(Comparison((model,), lambda: loss_fn(model, batch), given=batch))

    return plan_of(
        lambda: [situation(batch) for batch in taken],
        Bounds(max_error, min_cosine),
        fp32_cost=fp32_cost,
        scale=scale,
    )


def plan_of(
    situations: Callable[[], Sequence[Situation]],
    bounds: Bounds = Bounds(MAX_ERROR, MIN_COSINE),  # noqa: B008 - immutable
    *,
    fp32_cost: float = FP32_COST,
    scale: float = INITIAL_SCALE,
) -> PrecisionPlan:
    """Return the plan for some batches of the same models.

    situations: makes them, after the other arguments are checked.
    """
    for name, value, least, most in (
        ("max_error", bounds.max_error, 0.0, 10.0),
        ("min_cosine", bounds.min_cosine, -1.0, 1.0),
        ("fp32_cost", fp32_cost, 1.0, 1000.0),
        ("scale", scale, 1.0, 2.0**127),
    ):
        if not (isinstance(value, int | float) and least <= value <= most):
            raise ValueError(
                f"{name} = {value!r}: must be a number from {number(least)} to {number(most)}"
            )
    measurement = Measurement(situations(), bounds, fp32_cost, float(scale))
    searches = {dtype: PrecisionSearch(measurement, dtype) for dtype in LOW}
    points, best, notes = list[PlanPoint](), dict[torch.dtype, PlanPoint](), list[str]()
    for dtype, search in searches.items():
        try:
            found = search.run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the model's code, which may not allow this precision
            text = " ".join(str(error).split())[:200]
            notes.append(f"{PRECISIONS[dtype]} is not possible: {text}")
        else:
            best[dtype] = found.point
            points += [candidate.point for candidate in search.candidates]
            if not found.is_within:
                notes += _causes(found, dtype)
    try:
        points.append(measurement.candidate(torch.float32, {}, 1.0).point)
    except RuntimeError as error:  # likewise
        notes.append(f"fp32 is not possible: {' '.join(str(error).split())[:200]}")
    if not points:
        raise UnsupportedModel(" ".join(["the model runs in no precision:", *notes]))
    errors = {dtype: searches[dtype].errors() for dtype in best}
    if not any(work.operations for work in measurement.work.values()):
        notes.append("No operation was counted: times are unknown and shown as in fp32.")
    if measurement.is_compiled:
        notes.append(COMPILED)
    device = measurement.device
    return PrecisionPlan(
        max_error=bounds.max_error,
        min_cosine=bounds.min_cosine,
        batches=len(measurement.situations),
        cost="measured" if measurement.is_timed else "operations",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        fp32_cost=None if measurement.is_timed else fp32_cost,
        batch_deviation=measurement.batch_deviation(),
        points=pareto(points),
        of_precision={PRECISIONS[dtype]: point for dtype, point in best.items()},
        modules=_modules(measurement, errors),
        notes=[*_reasons(best), *notes],
    )


def _causes(found: Candidate, dtype: torch.dtype) -> list[str]:
    """Return what a precision diff finds where no mix is within the bounds."""
    with found.worst.ready() as comparison:
        diff = diff_of(
            comparison.models,
            comparison.closure,
            dtype,
            found.point.init_scale,
            given=comparison.given,
            names=comparison.setting.names,
            is_searched=False,
        )
    return [
        f"{PRECISIONS[dtype]}: a precision diff names {name}. If fp32 does not help, the code "
        "casts to half precision itself."
        for name in suggest(diff.rows, diff.dtype)[:3]
    ]


def pareto(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """Return the points that no other one exceeds in time, error and number of modules.

    The fastest first; of points with equal numbers the first.
    """
    front: list[PlanPoint] = []
    for point in sorted(points, key=lambda p: (p.time, p.error, len(p.named))):
        if not any(p.error <= point.error and len(p.named) <= len(point.named) for p in front):
            front.append(point)
    return front


def _reasons(best: Mapping[torch.dtype, PlanPoint]) -> list[str]:
    """Return which property of a format is the one that is too small."""
    plain = {dtype: not point.named and point.is_within for dtype, point in best.items()}
    if plain == {torch.float16: True, torch.bfloat16: False}:
        return [
            "Only bf16 exceeds the bounds, with 8 bits of precision; fp16, with 11 bits, is within "
            "them everywhere."
        ]
    if plain == {torch.float16: False, torch.bfloat16: True}:
        return [
            "Only fp16 exceeds the bounds, because of its range; bf16 has the range of fp32 and is "
            "within them everywhere."
        ]
    return []


def _modules(
    measurement: Measurement, errors: Mapping[torch.dtype, Mapping[str, float]]
) -> list[PlanModule]:
    """Return the modules in groups, the largest error first."""
    work = measurement.work
    operations = sum(module_work.operations for module_work in work.values()) or 1
    size = sum(module_work.bytes for module_work in work.values()) or 1
    dtype = next(iter(errors), None) if measurement.is_timed else None
    rows = []
    for group in measurement.groups():
        own = [work.get(name, Work(0, 0)) for name in group]
        row = PlanModule(
            role=group[0] if len(group) == 1 else wildcard(group[0]),
            names=list(group),
            type=measurement.tree.types.get(group[0], ""),
            errors={
                PRECISIONS[dtype]: math.hypot(*(caused.get(name, 0.0) for name in group))
                for dtype, caused in errors.items()
            },
            operations=sum(module_work.operations for module_work in own) / operations,
            memory=sum(module_work.bytes for module_work in own) / size,
            ms=None if dtype is None else measurement.fp32_ms(group, dtype),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -max(row.errors.values(), default=0.0))[:MODULES_SHOWN]
