"""Tensors that outlive a step, and what later steps have to know of them."""

from dataclasses import replace

from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.shadow.memory import SHADOW_DTYPES
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import OUTSIDE, Carried, Kept, Operation
from halfstep.shadow.scale import is_unknown
from halfstep.shadow.walk import first_defect

CAST = "_to_copy"
MOST_KEPT = 1000


def keep_nonfinite(mode: ShadowMode, step: int) -> None:
    """Keep why tensors that outlive the step are not finite."""
    carried = {key: each for key, each in mode.carried.items() if not each[0].expired()}
    for key, entry in mode.memory.entries.items():
        if entry.writers[-1].name != OUTSIDE:
            carried.pop(key, None)
        bad = (
            writer
            for writer in reversed(entry.writers)
            if writer.result and writer.result.nonfinite
        )
        latest = next(bad, None) if entry.is_suspect else None
        if entry.has_expired() or latest is None or len(carried) >= MOST_KEPT:
            continue
        if (kept := _why_carried(latest, step)) is not None:
            carried[key] = entry.storage, kept
    mode.carried = carried


def keep_scaled(mode: ShadowMode, step: int) -> None:
    """Keep what tensors that outlive the step have of scaled gradients, but for gradients."""
    kept = {key: each for key, each in mode.kept.items() if not each[0].expired()}
    for key, entry in mode.memory.entries.items():
        latest = entry.writers[-1]
        if latest.name == OUTSIDE:
            continue
        kept.pop(key, None)
        is_scaled = entry.power is not None and entry.power != 0
        is_result = is_scaled and not is_unknown(entry.power) and not latest.is_backward
        if is_result and not entry.has_expired() and len(kept) < MOST_KEPT:
            origin = replace(latest, inputs=[])
            kept[key] = entry.storage, Kept(step, mode.scale, origin)
    mode.kept = kept


def keep_halved(mode: ShadowMode) -> None:
    """Keep where tensors that outlive the step, such as weights, were cast to half precision."""
    halved = {key: each for key, each in mode.halved.items() if not each[0].expired()}
    for key, entry in mode.memory.entries.items():
        first = entry.writers[0]
        is_cast = first.name == CAST and entry.dtype in SHADOW_DTYPES
        if is_cast and not entry.has_expired() and len(halved) < MOST_KEPT:
            halved[key] = entry.storage, first.place
    mode.halved = halved


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
