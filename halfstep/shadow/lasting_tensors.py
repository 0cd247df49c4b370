"""Tensors that outlive a step, and what later steps have to know of them."""

from itertools import islice

from halfstep.shadow.memory import SHADOW_DTYPES, Entry
from halfstep.shadow.mode import ShadowMode
from halfstep.shadow.operations import OUTSIDE, Carried, Kept, Operation, Rounded
from halfstep.shadow.scale import is_unknown
from halfstep.shadow.walk import first_defect

CAST = "_to_copy"
ROUNDED = 0.1  # distance from fp32, relative to it, at which a tensor is wrong
MOST_COMPARED, MOST_ELEMENTS = 100, 10_000_000  # tensors of a step, and elements of each


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
            mode.kept.add(entry.storage, Kept(step, mode.scale, latest.alone()))


def keep_halved(mode: ShadowMode) -> None:
    """Keep where tensors that outlive the step, such as weights, were cast to half precision."""
    for entry in mode.memory.entries.values():
        first = entry.writers[0]
        is_cast = first.name == CAST and entry.dtype in SHADOW_DTYPES
        if is_cast and not entry.has_expired():
            mode.halved.add(entry.storage, first.place)


def keep_rounded(mode: ShadowMode, step: int) -> None:
    """Keep which tensors of the forward pass outlive the step and are far from fp32."""
    for entry in islice(filter(_is_lasting_result, mode.memory.entries.values()), MOST_COMPARED):
        distance, size = entry.distance()
        if distance > ROUNDED * size > 0.0:
            writer = entry.writers[0]
            root = (writer.root or writer).alone()
            mode.rounded.add(entry.storage, Rounded(step, distance / size, root, writer.alone()))


def _is_lasting_result(entry: Entry) -> bool:
    """Return whether one operator of this forward pass has made a finite tensor that still exists.

    Complex ones are left out: torch computes little with their half precision.
    """
    writer = entry.writers[0]
    is_made = len(entry.writers) == 1 and writer.number > 0 and not writer.is_backward
    if not is_made or entry.values is None or entry.is_suspect or entry.has_expired():
        return False
    is_half = entry.dtype in SHADOW_DTYPES and entry.dtype.is_floating_point
    return is_half and entry.values.numel() <= MOST_ELEMENTS


def _why_carried(latest: Operation, step: int) -> Carried | None:
    origin = first_defect(latest)
    if origin.name == OUTSIDE:
        if origin.carried is not None:
            return origin.carried
        if latest is origin:  # an input that lives on
            return None
    elif not origin.inputs or origin.has_infinite_argument:  # made by the loop on purpose
        return None
    return Carried(step, origin.alone())
