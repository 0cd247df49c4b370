"""Modules that should stay in fp32, by a precision diff."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from halfstep.number_formats import number, percent
from halfstep.telemetry.events import PrecisionDiff, PrecisionRow

#: Largest relative error of rounding one number.
ROUNDING_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Local errors up to this many rounding units are noise: those of healthy modules are 1 to 3.
NOISE_UNITS = 8
#: Share of its local error that a suggested module may still have in fp32.
STAYING_SHARE = 0.5
#: Bounds of the error and the cosine similarity of the whole gradient, as of a precision plan.
MAX_ERROR, MIN_COSINE = 0.1, 0.99
LOSS = "(loss)"
OF_DIRECTION = {
    "forward": "its results",
    "backward": "the gradients of its inputs",
    "parameter": "the gradient of",
}


class Suggestion(NamedTuple):
    """A module that should stay in fp32."""

    name: str  # LOSS: the loss function's own operations
    error: float  # the largest of its local errors; 0 if none is known
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.evidence)}"


class Suggestions(list[Suggestion]):
    """Suggestions, the largest local error first."""

    def __init__(self, suggestions: Iterable[Suggestion] = (), remains: str = "") -> None:
        super().__init__(suggestions)
        self.remains = remains  # what stays wrong with these in fp32, as a sentence

    def __str__(self) -> str:
        lines = [*map(str, self), *filter(None, [self.remains])]
        if lines:
            return "\n".join(lines)
        return f"No module needs fp32: no local error above {NOISE_UNITS} rounding units."

    __repr__ = __str__


def suggestions_of(diff: PrecisionDiff) -> Suggestions:
    """Return the modules that a diff suggests, with the evidence, and what remains wrong."""
    known = {suggestion.name: suggestion for suggestion in suggest(diff.rows, diff.dtype)}
    found = [known.get(name) or _of_whole(name, diff) for name in diff.suggested]
    return Suggestions(found, _remains(diff))


def _of_whole(name: str, diff: PrecisionDiff) -> Suggestion:
    """Return a suggestion for which no local error is evidence, but that of the whole gradient."""
    own = [float(row.local) for row in diff.rows if row.name == name and row.local is not None]
    after = f"{number(float(diff.suggested_error))} " if diff.suggested_error is not None else ""
    text = f"gradient error {after}with the suggested modules in fp32, {number(float(diff.error))} "
    return Suggestion(name, max(own, default=0.0), (f"{text}without",))


def _remains(diff: PrecisionDiff) -> str:
    """Return what is wrong with the gradient in spite of the suggestions, or ""."""
    if not diff.suggested:
        if is_within(float(diff.error), float(diff.cosine)):
            return ""
        return (
            f"The gradient {_wrong(float(diff.error))}, and no module was found whose fp32 helps."
        )
    if diff.suggested_error is None or float(diff.suggested_error) <= MAX_ERROR:
        return ""
    return f"With these in fp32, the gradient still {_wrong(float(diff.suggested_error))}."


def _wrong(error: float) -> str:
    return f"has an error of {number(error)}" if math.isfinite(error) else "is not finite"


def is_within(error: float, cosine: float) -> bool:
    """Return whether a gradient is within the bounds of a plan. cosine: NaN of a zero gradient."""
    return error <= MAX_ERROR and not cosine < MIN_COSINE


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
    return Suggestions(sorted(found, key=lambda suggestion: -suggestion.error))


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
