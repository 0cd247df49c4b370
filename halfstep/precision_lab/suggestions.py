"""Modules that should stay in fp32, by the rows of a precision diff."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from halfstep.number_formats import number, percent
from halfstep.telemetry.events import PrecisionRow

#: Largest relative error of rounding one number.
ROUNDING_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Local errors up to this many rounding units are noise: those of healthy modules are 1 to 3.
NOISE_UNITS = 8
#: Share of its local error that a suggested module may still have in fp32.
STAYING_SHARE = 0.5
LOSS = "(loss)"
OF_DIRECTION = {
    "forward": "its results",
    "backward": "the gradients of its inputs",
    "parameter": "the gradient of",
}


class Suggestion(NamedTuple):
    """A module that should stay in fp32."""

    name: str  # LOSS: the loss function's own operations
    error: float  # the largest of its local errors
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.evidence)}"


class Suggestions(list[Suggestion]):
    """Suggestions, the largest local error first."""

    def __str__(self) -> str:
        if self:
            return "\n".join(map(str, self))
        return f"No module needs fp32: no local error above {NOISE_UNITS} rounding units."

    __repr__ = __str__


def suggest(rows: Iterable[PrecisionRow], dtype: str) -> Suggestions:
    """Return the modules whose local error is above the noise, and that fp32 would repair.

    A module inside a suggested one is left out.
    """
    evidence: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.local is None or row.local_fp32 is None:
            continue
        local, in_fp32 = float(row.local), float(row.local_fp32)
        # A region of the model may compute in the coarser format of both.
        unit = max(ROUNDING_UNIT[dtype], ROUNDING_UNIT.get(row.dtype, 0))
        if local <= NOISE_UNITS * unit or not in_fp32 < STAYING_SHARE * local:
            continue
        for name in row.used_by if row.direction == "parameter" else [row.name]:
            texts = evidence.setdefault(name, {})
            text = _evidence(row, local, in_fp32, unit)
            texts[text] = local
    found = [
        Suggestion(name, max(texts.values()), tuple(sorted(texts, key=lambda t: -texts[t]))[:3])
        for name, texts in evidence.items()
        if not _is_inside(name, list(evidence))
    ]
    return Suggestions(sorted(found, key=lambda each: -each.error))


def _is_inside(name: str, others: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _evidence(row: PrecisionRow, local: float, in_fp32: float, unit: float) -> str:
    what = OF_DIRECTION[row.direction]
    if row.direction == "parameter":
        what = f"{what} {row.name}"
    if local == float("inf"):
        size = "not finite"
    else:
        size = f"{number(local)}, {number(local / unit)} rounding units"
    extra = ""
    if float(row.local_saturated or 0) > 0:
        extra = f", {percent(float(row.local_saturated or 0))} beyond the format's largest number"
    elif float(row.local_flushed or 0) > 0.01:
        extra = f", {percent(float(row.local_flushed or 0))} flushed to zero"
    return f"local error of {what} {size}{extra}; in fp32 {number(in_fp32)}"
