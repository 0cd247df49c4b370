"""Paired test of two groups: equivalent within a margin, higher, lower, or not decided.

The differences of the pairs are taken as independent and normal. "Higher" and "lower" come from the
95 % t-interval of their mean, equivalence from two one-sided t-tests at 5 %, which reject exactly
if the 90 % interval is within the margin.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from halfstep.number_formats import number

Decision = Literal["equivalent", "higher", "lower", "undecided", "unknown"]

#: Confidence of the interval for a difference, and of that of two one-sided tests at 5 %.
CONFIDENCE, EQUIVALENCE_CONFIDENCE = 0.95, 0.9
#: Probability to decide that the estimated number of further pairs gives.
POWER = 0.8
#: Confidence of the interval of the standard deviation, for the range of that number.
DEVIATION_CONFIDENCE = 0.8
#: Parts of the distribution of a deviation over which that probability is summed.
QUANTILES = 512
#: Limit of that number.
MOST_PAIRS = 1000
#: Larger values have squares that could overflow.
LARGEST = 1e150
#: Largest rounding error of a difference, in units of the last place of the largest value.
ROUNDING = 256


@dataclass(frozen=True)
class Interval:
    """A confidence interval of the mean difference."""

    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        """Return whether the interval is inside ± margin."""
        return -margin < self.low and self.high < margin


@dataclass(frozen=True)
class FurtherPairs:
    """Estimated number of further pairs that decide with a probability of POWER.

    The true difference is taken as measured. None: more than MOST_PAIRS.
    """

    about: int | None  # with the measured standard deviation
    least: int | None  # estimate at the lower limit of the deviation's interval
    most: int | None  # estimate at its upper limit


@dataclass(frozen=True)
class PairedTest:
    """The result for the pairs of two groups."""

    decision: Decision
    pairs: int
    reason: str = ""  # why it is unknown
    difference: float | None = None  # mean of value - reference
    deviation: float | None = None  # standard deviation of the differences
    interval: Interval | None = None  # 95 %
    equivalence_interval: Interval | None = None  # 90 %
    further: FurtherPairs | None = None  # if undecided with a margin


def compare_pairs(
    values: Sequence[float], references: Sequence[float], margin: float | None
) -> PairedTest:
    """Compare values with the references of the same pairs.

    margin: largest difference that counts as equal; None: equivalence is not tested.
    """
    pairs = len(values)
    if pairs < 2:
        text = "no pair" if not pairs else "1 pair"
        return PairedTest("unknown", pairs, f"{text}; at least 2 are needed")
    sizes = [abs(value) for value in (*values, *references)]
    if not all(size <= LARGEST for size in sizes):  # NaN is not, either
        return PairedTest("unknown", pairs, "a value is NaN, infinite or beyond ±1e150")
    differences = np.subtract(values, references, dtype=float)
    difference, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if deviation <= ROUNDING * np.finfo(float).eps * max(sizes):
        text = f"all differences are equal ({number(difference)}), so their spread is unknown; "
        text += "a finer metric or more seeds may show it"
        return PairedTest("unknown", pairs, text, difference, 0.0)
    narrow, wide = (
        Interval(difference - half, difference + half)
        for confidence in (EQUIVALENCE_CONFIDENCE, CONFIDENCE)
        for half in (float(half_width(deviation, pairs, confidence)),)
    )
    decision, further = _decision(narrow, wide, margin), None
    if decision == "undecided" and margin is not None:
        further = _further_pairs(difference, deviation, margin, pairs)
    return PairedTest(decision, pairs, "", difference, deviation, wide, narrow, further)


def half_width(deviation: object, pairs: int, confidence: float) -> Any:
    """Return half the width of the t-interval of the mean of `pairs` differences."""
    from scipy import special  # deferred: takes half a second and 27 MB

    return special.stdtrit(pairs - 1, (1 + confidence) / 2) * deviation / math.sqrt(pairs)


def _decision(narrow: Interval, wide: Interval, margin: float | None) -> Decision:
    if margin is not None and narrow.is_within(margin):
        return "equivalent"
    if wide.low > 0:
        return "higher"
    return "lower" if wide.high < 0 else "undecided"


def _further_pairs(difference: float, deviation: float, margin: float, pairs: int) -> FurtherPairs:
    from scipy import special

    tail = (1 - DEVIATION_CONFIDENCE) / 2
    limits = [math.sqrt((pairs - 1) / special.chdtri(pairs - 1, p)) for p in (tail, 1 - tail)]
    least, about, most = (
        _pairs_needed(abs(difference), deviation * factor, margin, pairs)
        for factor in (limits[0], 1, limits[1])
    )
    return FurtherPairs(about, least, most)


def _pairs_needed(size: float, deviation: float, margin: float, pairs: int) -> int | None:
    """Return how many further pairs decide with a probability of POWER.

    size: absolute true difference.
    """

    def power(further: int) -> float:
        return _power(size, deviation, margin, pairs + further)

    further = 1 + bisect_left(range(1, MOST_PAIRS + 1), POWER, key=power)
    return further if further <= MOST_PAIRS else None


def _power(size: float, deviation: float, margin: float, pairs: int) -> float:
    """Return with what probability the pairs are equivalent, lower or higher.

    The measured deviation is independent of the mean: its distribution is cut into QUANTILES
    parts of equal probability, and in each the mean is normal.
    """
    from scipy import special

    freedom, error = pairs - 1, deviation / math.sqrt(pairs)
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    measured = np.sqrt(special.chdtri(freedom, shares) / freedom)  # in units of the true deviation
    two_sided, one_sided = (
        special.stdtrit(freedom, (1 + confidence) / 2) * measured
        for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)
    )
    # Not decided: the absolute mean is between these, in standard errors.
    low = np.minimum(np.maximum(margin / error - one_sided, 0), two_sided)
    at = size / error
    undecided = special.ndtr(two_sided - at) - special.ndtr(low - at)
    undecided += special.ndtr(-low - at) - special.ndtr(-two_sided - at)
    return float(1 - undecided.mean())
