"""Tensors that outlive a step, and what later steps have to know of them."""

from dataclasses import replace

from halfstep.shadow.memory import SHADOW_DTYPES
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import OUTSIDE, Carried, Kept, Operation
from halfstep.shadow.scale import is_unknown
from halfstep.shadow.walk import first_defect

CAST = "_to_copy"


def keep_nonfinite(mode: ShadowMode, step: int) -> None:
    """Keep why tensors that outlive the step are not finite."""
    for key, entry in mode.memory.entries.items():
        if entry.writers[-1].name != OUTSIDE:
            mode.carried.drop(key)
        bad = (
            writer
            for writer in reversed(entry.writers)
            if writer.result and writer.result.nonfinite
        )
        latest = next(bad, None) if entry.is_suspect else None
        if entry.has_expired() or latest is None:
            continue
        if (why := _why_carried(latest, step)) is not None:
            mode.carried.add(entry.storage, why)


def keep_scaled(mode: ShadowMode, step: int) -> None:
    """Keep what tensors that outlive the step have of scaled gradients, but for gradients."""
    for key, entry in mode.memory.entries.items():
        latest = entry.writers[-1]
        if latest.name == OUTSIDE:
            continue
        mode.kept.drop(key)
        is_scaled = entry.power is not None and entry.power != 0
        is_result = is_scaled and not is_unknown(entry.power) and not latest.is_backward
        if is_result and not entry.has_expired():
            mode.kept.add(entry.storage, Kept(step, mode.scale, replace(latest, inputs=[])))


def keep_halved(mode: ShadowMode) -> None:
    """Keep where tensors that outlive the step, such as weights, were cast to half precision."""
    for entry in mode.memory.entries.values():
        first = entry.writers[0]
        is_cast = first.name == CAST and entry.dtype in SHADOW_DTYPES
        if is_cast and not entry.has_expired():
            mode.halved.add(entry.storage, first.place)


def _why_carried(latest: Operation, step: int) -> Carried | None:
    origin = first_defect(latest)
    if origin.name == OUTSIDE:
        if origin.carried is not None:
            return origin.carried
        if latest is origin:  # an input that lives on
            return None
    elif not origin.inputs or origin.has_infinite_argument:  # made by the loop on purpose
        return None
    return Carried(step, replace(origin, inputs=[]))
