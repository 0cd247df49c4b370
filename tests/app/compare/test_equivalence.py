"""The statistics of paired values: equivalent, higher, lower, not decided, or unknown."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from app.compare import equivalence
from app.compare.equivalence import Interval, compare_pairs, half_width
from tests.marks import looped

EXPERIMENTS = 20_000
#: Three standard errors of a rate of 5 % in so many experiments.
NOISE = 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)


def simulate(difference: float, pairs: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means and deviations of experiments whose differences have a deviation of 1."""
    generator = np.random.default_rng(pairs)
    differences = generator.normal(difference, 1, (EXPERIMENTS, pairs))
    return differences.mean(axis=1), differences.std(axis=1, ddof=1)


@looped("pairs", [2, 3, 5, 12])
def test_error_rates_are_those_that_are_claimed(pairs: int) -> None:
    """Without a difference 5 % of parity tests decide lower or higher; at a difference of the
    margin 5 % decide equivalent; 95 % of the intervals have the true difference.
    """
    means, deviations = simulate(0.0, pairs)
    half = half_width(deviations, pairs, 0.95)
    assert np.mean(means + half < 0) <= 0.05
    assert np.mean(means - half > 0) <= 0.05
    assert np.mean(np.abs(means) <= half) == pytest.approx(0.95, abs=0.02)
    for margin in (0.5, 1.0, 3.0):
        for true in (margin, -margin):
            means, deviations = simulate(true, pairs)
            half = half_width(deviations, pairs, 0.9)
            assert np.mean(np.abs(means) + half < margin) <= 0.05 + NOISE


def test_the_documented_rates_are_measured() -> None:
    """The table in docs/how-to/compare.md has the measured rates of equivalence by seeds and
    margin, and of errors with repeated tests.
    """
    text = (Path(__file__).parents[3] / "docs/how-to/compare.md").read_text()
    number = r"([01]\.\d\d)"
    rows = re.findall(rf"^\| (\d+) \| {number} \| {number} \| {number} \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for seeds, *rates in rows:
        means, deviations = simulate(0.0, int(seeds))
        half = half_width(deviations, int(seeds), 0.9)
        found = [np.mean(np.abs(means) + half < margin) for margin in (1, 2, 3)]
        assert found == pytest.approx([float(rate) for rate in rates], abs=0.015)
    for counts, documented in (([3, 6], "8 % of cases if three"), (range(3, 26), "14 % if the")):
        assert f"in up to {documented}" in " ".join(text.split())
        most = float(documented.split()[0]) / 100
        worst = max(_wrongly_equivalent(counts, margin) for margin in (0.5, 1.0, 2.0))
        assert most - 0.015 < worst <= most


def _wrongly_equivalent(counts: Iterable[int], margin: float) -> float:
    """Return how often a difference equal to the margin is found equivalent at some count."""
    differences = np.random.default_rng(1).normal(margin, 1, (EXPERIMENTS, 25))
    is_equivalent = is_decided = np.zeros(EXPERIMENTS, bool)
    for count in counts:
        means = differences[:, :count].mean(axis=1)
        deviations = differences[:, :count].std(axis=1, ddof=1)
        narrow, wide = (half_width(deviations, count, confidence) for confidence in (0.9, 0.95))
        is_now = ~is_decided & (np.abs(means) + narrow < margin)
        is_equivalent = is_equivalent | is_now
        is_decided = is_decided | is_now | (np.abs(means) > wide)
    return float(np.mean(is_equivalent))


@looped(
    "pairs, difference, margin",
    [(3, 0.2, 1.5), (4, 0.9, 1.0), (5, 0.5, 1.0), (6, 0.4, 0.8), (3, 1.2, 1.0)],
)
def test_the_further_pairs_decide_as_often_as_estimated(
    pairs: int, difference: float, margin: float
) -> None:
    """After the estimated further pairs 80 % of parity tests decide, and fewer with one pair less.
    A decision is any of the three: a difference of half the margin is found by either test.
    """
    values = difference + np.linspace(-1, 1, pairs) / np.linspace(-1, 1, pairs).std(ddof=1)
    result = compare_pairs(values.tolist(), [0.0] * pairs, margin)
    assert result.deviation == pytest.approx(1.0)
    assert result.further is not None
    assert result.further.about
    assert result.further.least
    assert result.further.least <= result.further.about
    assert result.further.most is None or result.further.about <= result.further.most
    rates = []
    for count in (result.further.about - 1, result.further.about):
        means, deviations = simulate(difference, pairs + count)
        narrow, wide = (half_width(deviations, pairs + count, c) for c in (0.9, 0.95))
        rates.append(np.mean((np.abs(means) + narrow < margin) | (np.abs(means) > wide)))
    noise = 3 * math.sqrt(0.8 * 0.2 / EXPERIMENTS)
    assert rates[0] < 0.8 + noise
    assert rates[1] >= 0.8 - noise


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
        min_size=2,
        max_size=25,
    ),
    st.floats(1e-6, 1e6),
)
def test_intervals_and_decisions_agree_with_scipy(
    pairs: list[tuple[float, float]], margin: float
) -> None:
    """Intervals equal scipy's, and runs are equivalent if both one-sided tests reject at 5 %."""
    values, references = zip(*pairs, strict=True)
    result = compare_pairs(values, references, margin)
    if result.decision == "unknown":
        assert np.ptp(np.subtract(values, references)) <= 1e-7
        return
    differences = np.subtract(values, references)
    assert result.interval
    assert result.equivalence_interval
    shape = {"loc": differences.mean(), "scale": stats.sem(differences), "df": len(pairs) - 1}
    assert (result.interval.low, result.interval.high) == pytest.approx(
        stats.t.interval(0.95, **shape), rel=1e-9, abs=1e-9
    )
    assert (result.equivalence_interval.low, result.equivalence_interval.high) == pytest.approx(
        stats.t.interval(0.9, **shape), rel=1e-9, abs=1e-9
    )
    tests = [
        stats.ttest_1samp(differences, limit, alternative=side).pvalue
        for limit, side in ((-margin, "greater"), (margin, "less"))
    ]
    if abs(max(tests) - 0.05) > 1e-6:
        assert (result.decision == "equivalent") == (max(tests) < 0.05)
    if result.decision in ("lower", "higher"):
        assert stats.ttest_1samp(differences, 0).pvalue < 0.05 + 1e-6


def test_each_decision() -> None:
    """Equal differences of about -0.01 are equivalent, lower or undecided, depending on the
    margin.
    """
    values, references = [0.95, 0.96, 0.94, 0.955, 0.945], [0.96, 0.971, 0.949, 0.965, 0.956]
    decisions = [compare_pairs(values, references, m).decision for m in (0.02, 0.01, None)]
    assert decisions == ["equivalent", "lower", "lower"]
    assert compare_pairs(references, values, 0.001).decision == "higher"
    spread = compare_pairs([1.0, 2.0, 3.0], [2.0, 2.0, 2.1], 0.1)
    assert (spread.decision, spread.pairs) == ("undecided", 3)
    assert spread.further
    assert spread.further.most is None
    assert compare_pairs([1.0, 2.0, 3.0], [2.0, 2.0, 2.1], None).further is None


def test_two_pairs_have_one_degree_of_freedom() -> None:
    """The interval of two pairs is 12.7 standard errors wide to each side."""
    result = compare_pairs([1.0, 3.0], [0.0, 0.0], 1.0)
    error = math.sqrt(2) / math.sqrt(2)
    half = 12.706204736432095 * error
    assert result.interval == Interval(pytest.approx(2 - half), pytest.approx(2 + half))
    assert result.decision == "undecided"


@looped("unusable", [math.nan, math.inf, -math.inf, 1e151, -1e300])
@looped("is_reference", [True, False])
def test_values_that_are_no_numbers_are_unknown(unusable: float, is_reference: bool) -> None:
    """One NaN or infinite value makes a comparison unknown."""
    pairs = ([1.0, 2.0, 4.0], [1.0, unusable, 2.0])
    result = compare_pairs(*(pairs if is_reference else pairs[::-1]), 1.0)
    assert (result.decision, result.interval) == ("unknown", None)
    assert "NaN, infinite" in result.reason


@pytest.mark.parametrize("values", [[], [1.0], [math.nan]])
def test_fewer_than_two_pairs_are_unknown(values: list[float]) -> None:
    """Fewer than two pairs have no spread, so the parity is unknown."""
    result = compare_pairs(values, values, 1.0)
    assert (result.decision, result.pairs) == ("unknown", len(values))
    assert "at least 2 are needed" in result.reason


@looped("scale", [1e-300, 1e-9, 1.0, 1e9, 1e149])
@looped("difference", [0.0, 0.1, -0.3])
def test_equal_differences_are_unknown(scale: float, difference: float) -> None:
    """Differences that are equal up to rounding are unknown: their spread says nothing
    about other seeds.
    """
    references = [scale * value for value in (0.1, 0.2, 0.3, 0.7)]
    values = [value + scale * difference for value in references]
    result = compare_pairs(values, references, scale)
    assert (result.decision, result.interval, result.deviation) == ("unknown", None, 0.0)
    assert result.difference == pytest.approx(scale * difference)
    assert "all differences are equal" in result.reason


@given(st.floats(1e-140, 1e140), st.sampled_from([0.01, 0.5, 1.0, 20.0]))
def test_decisions_do_not_depend_on_the_unit(unit: float, margin: float) -> None:
    """A loss in other units, with the margin in them, gives the same decision and estimate."""
    values, references = [1.0, 1.5, 1.1, 0.6], [1.2, 1.1, 1.0, 1.3]
    plain = compare_pairs(values, references, margin)
    scaled = compare_pairs(
        [unit * value for value in values], [unit * value for value in references], unit * margin
    )
    assert (scaled.decision, scaled.further) == (plain.decision, plain.further)


@example(2, -1.197, 0.838, 0)
@given(st.integers(2, 25), st.floats(-3, 1), st.floats(0, 0.999), st.integers(0, 2**32 - 1))
def test_the_estimate_grows_with_the_deviation(
    pairs: int, exponent: float, t_share: float, seed: int
) -> None:
    """The estimate grows with the deviation for margins far below to far above the difference,
    and for differences that are almost found, where the statistics are largest.
    """
    values = np.random.default_rng(seed).normal(0, 1, pairs)
    values = (values - values.mean()) / values.std(ddof=1)
    values += t_share * float(half_width(1.0, pairs, 0.95))
    result = compare_pairs(values.tolist(), [0.0] * pairs, 10**exponent)
    assert result.decision in ("undecided", "equivalent")
    if result.further is None:
        assert result.decision == "equivalent"
        return
    most = equivalence.MOST_PAIRS
    least, about, highest = (
        each or most + 1
        for each in (result.further.least, result.further.about, result.further.most)
    )
    assert 1 <= least <= about <= highest <= most + 1
