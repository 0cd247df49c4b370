"""The defect of the operator where a symptom began. This module imports torch."""

import dataclasses
import math

import torch
from msgspec.structs import replace

from halfstep.diagnosis.defect import ATTENTIONS, Defect, Kind, Remedy, Site, Symptom
from halfstep.shadow.facts import Facts
from halfstep.shadow.lines import place_of_outermost_module
from halfstep.shadow.operations import OUTSIDE, Operation, Place, Rounded
from halfstep.shadow.walk import (
    earliest,
    find_carried_source,
    find_flushed_inputs,
    find_large,
    first_defect,
    first_flushed,
    first_infinity,
    first_rounded,
    has_lost,
    has_root_of_difference,
    writers,
)

DEEPEST = 50
BF16, FP32 = torch.finfo(torch.bfloat16), torch.finfo(torch.float32)


def site_of(operation: Operation) -> Site:
    """Return an operation as a part of a defect."""
    place = operation.place
    return Site(
        operator=operation.name,
        file=place.file,
        line=place.line,
        caller_file=place.caller_file,
        caller_line=place.caller_line,
        source=place.source(),
        module=operation.module,
        node=operation.node,
        variable=operation.variable,
    )


def trace(operation: Operation, symptom: Symptom, step: int) -> Defect:
    """Return the defect of an operation's nonfinite result."""
    first = first_defect(operation)
    defect = classify(first, symptom, step, is_lost=has_lost(operation))
    if "bf16" in defect.helps and has_root_of_difference(operation, first):
        return replace(defect, helps=tuple(each for each in defect.helps if each != "bf16"))
    return defect


def classify(
    operation: Operation, symptom: Symptom, step: int, depth: int = 0, *, is_lost: bool = False
) -> Defect:
    """Return the defect of the first operation with a defect.

    is_lost: only what was lost to half precision counts.
    """
    facts = operation.result or Facts(0)
    if operation.name == OUTSIDE:
        return _outside(operation, facts, symptom, step)
    infinities = [
        operand for operand in operation.inputs if operand.facts and operand.facts.has_infinity
    ]
    is_undefined = facts.shadow_nan and not is_lost
    if not is_undefined and depth < DEEPEST:
        lost = writers(operation, lambda other: bool(other.lost))
        if (facts.lost or infinities) and (
            found := earliest(map(first_defect, lost), before=operation)
        ):
            return classify(found, symptom, step, depth + 1, is_lost=True)
    defect = Defect(
        step=step,
        kind="undefined",
        symptom=symptom,
        site=site_of(operation),
        dtype=str(operation.dtype).removeprefix("torch."),
        count=facts.nonfinite,
        elements=facts.elements,
    )
    if facts.lost and not is_undefined and (is_lost or not facts.shadow_nonfinite):
        return _lost(operation, facts, defect)
    if operation.beyond_fp32 is not None:
        limit = FP32.max
        if (large := find_large(operation)) is not None:
            defect = _outside(large, facts, symptom, step)
            return replace(
                defect,
                kind="nonfinite_input",
                value=large.largest,
                limit=limit,
                origin=site_of(operation),
            )
        return replace(
            defect, kind="overflow", dtype="float32", value=operation.beyond_fp32, limit=limit
        )
    if facts.nonfinite and infinities and depth < DEEPEST:
        source = first_infinity(operation)
        is_made = source.name != OUTSIDE or source.carried is not None
        is_mask = not is_made and operation.name.startswith(ATTENTIONS)
        if not (is_mask or source.has_infinite_argument or source is operation):
            return classify(source, symptom, step, depth + 1)
        return replace(defect, is_infinite=True, origin=site_of(source))
    if not operation.inputs:  # as of torch.full(…, nan)
        return _outside(operation, facts, symptom, step)
    if (carried := find_carried_source(operation)) is not None:
        return _outside(carried, facts, symptom, step)
    if operation.has_nan_argument:
        return replace(defect, kind="nonfinite_input", count=0)  # of a tensor
    latest = (operand.writers[-1] for operand in operation.inputs)
    drawn = next((writer for writer in latest if writer.is_zero_drawn), None)
    if drawn is not None and not facts.nan:  # which a 0 alone does not make
        return replace(defect, kind="rounding", origin=site_of(drawn), helps=("fp32",))
    return defect


def _outside(operation: Operation, facts: Facts, symptom: Symptom, step: int) -> Defect:
    defect = Defect(
        step=step,
        kind="nonfinite_weight" if operation.held_as else "nonfinite_input",
        symptom=symptom,
        site=site_of(operation),
        count=facts.nonfinite,
        elements=facts.elements,
    )
    if operation.carried is None:
        return defect
    origin = operation.carried.origin
    if origin is not None and origin.name == OUTSIDE:
        return replace(defect, site=replace(site_of(origin), variable=operation.variable))
    return replace(
        defect,
        kind="carried",
        carried_from=operation.carried.step,
        origin=None if origin is None else site_of(origin),
        is_in_fp32=origin is not None and origin.result is not None and not origin.result.lost,
    )


def _lost(operation: Operation, facts: Facts, defect: Defect) -> Defect:
    """Return the defect of values that are finite in fp32."""
    limit = torch.finfo(operation.dtype or torch.float16).max
    defect = replace(
        defect,
        count=facts.lost,
        value=facts.largest,
        limit=limit,
        depends_on_scale=operation.power != 0,
    )
    is_large = facts.largest is not None and facts.largest > limit / 2  # before a rounding
    if operation.is_own or (is_large and operation.is_own is None):
        largest = facts.largest or 0.0
        has_constant = largest > 0 and largest % limit == 0  # finfo.max twice: bf16 has its own
        is_in_range = largest <= BF16.max and not has_constant
        helps: tuple[Remedy, ...] = ("fp32", "bf16") if is_in_range else ("fp32",)
        return replace(defect, kind="overflow", helps=_for(operation, helps))
    flushed = find_flushed_inputs(operation)
    if not flushed and operation.sample is None:
        return replace(defect, kind="overflow", helps=_for(operation, ("fp32", "bf16")))
    value = max((facts.smallest or 0.0 for facts in flushed), default=None)
    rounded = first_rounded(first_flushed(operation) if flushed else operation)
    origin = first_flushed(operation) if flushed else rounded
    overflowed = writers(origin, lambda other: bool(other.lost))
    if (found := earliest(overflowed, before=origin)) is not None:  # 0 by a division by infinity
        return classify(first_defect(found), defect.symptom, defect.step, DEEPEST - 1, is_lost=True)
    is_range = value is not None and origin.dtype is not None
    is_range = is_range and value < torch.finfo(origin.dtype).smallest_normal  # type: ignore[operator, arg-type]
    helps = ("fp32", "bf16") if is_range and value > BF16.smallest_normal else ("fp32",)  # type: ignore[operator]
    return replace(
        defect,
        kind="rounding",
        dtype=str(rounded.dtype or operation.dtype).removeprefix("torch."),
        value=value,
        sample=None if flushed else operation.sample,
        origin=site_of(origin),
        rounded_in=None if rounded is origin else site_of(rounded),
        helps=_for(operation, helps),
    )


def _for(operation: Operation, helps: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """Leave bf16 out where it is the dtype already."""
    if operation.dtype is torch.bfloat16:
        return tuple(remedy for remedy in helps if remedy != "bf16")
    return helps


def of_scale(defect: Defect, scale: float) -> Defect:
    """Return an overflow that a smaller loss scale would not have as one of the scale."""
    is_overflow = defect.kind == "overflow" and defect.depends_on_scale
    if not (is_overflow and defect.value and defect.limit):
        return defect
    fits_below = 2.0 ** math.floor(math.log2(scale * defect.limit / defect.value))
    if fits_below < 1.0:
        return defect
    return replace(
        defect,
        kind="scale_too_large",
        symptom="gradient",
        scale=scale,
        fits_below=fits_below,
        helps=("smaller_scale", *defect.helps),
    )


def is_bad_number(operation: Operation) -> bool:
    """Return whether a number without effect on the training is wrong; an infinity may be meant.

    A constant of the loop that is infinite in half precision is one, such as -1e9 in a mask.
    """
    facts, inputs = operation.result, operation.inputs
    is_cast = operation.name == "_to_copy" and bool(inputs)
    if is_cast and all(writer.name == OUTSIDE for each in inputs for writer in each.writers):
        return False
    return facts is not None and bool(facts.nan or facts.lost)


def is_out_of_range(kind: Kind) -> bool:
    """Return whether values were lost to half precision."""
    return kind in ("overflow", "rounding", "scale_too_large")


def stale_cast_defect(operation: Operation, region: Place, step: int) -> Defect:
    """Return the defect of a weight's cast from before the weight changed.

    region: where autocast was entered.
    """
    place = place_of_outermost_module() or operation.place
    return Defect(
        step=step,
        kind="stale_weight_cache",
        symptom="weight",
        site=site_of(dataclasses.replace(operation, place=place)),
        origin=site_of(Operation(0, "autocast", place=region)) if region.line else None,
    )


def integers_defect(operation: Operation, share: float, step: int) -> Defect:
    """Return the defect of integers that are others in fp32; at the cast that has rounded them."""
    maker = operation.inputs[0].writers[-1] if operation.inputs else operation
    is_cast = maker.name == "_to_copy"
    return Defect(
        step=step,
        kind="integers_differ",
        symptom="value",
        site=site_of(maker if is_cast else operation),
        origin=site_of(operation) if is_cast else None,
        dtype=str(operation.dtype).removeprefix("torch."),
        share=share,
        helps=("fp32",),
    )


def rounded_defect(rounded: Rounded) -> Defect:
    """Return the defect of a tensor that its step has left far from fp32, and a later one uses."""
    is_one = rounded.root.number == rounded.maker.number
    return Defect(
        step=rounded.step,
        kind="kept_rounded",
        symptom="value",
        site=site_of(rounded.root),
        origin=None if is_one else site_of(rounded.maker),
        dtype=str(rounded.maker.dtype).removeprefix("torch."),
        share=rounded.share,
        helps=("fp32",),
    )
