"""Loss-scale health of a training, derived from its skipped steps."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from halfstep import number_formats

WINDOW = 1000
SETTLED = 100  # steps after the first search for a scale that are judged, at most
#: Applied steps in a row that end the first search for a scale, as in the trainer.
CALIBRATED_AFTER = 25
#: Steps that the search may take: from the largest scale, 2^127, 127 skips lead down to 1.
CALIBRATING_FOR = 200
#: One skip undoes a growth, so ten in a row, a factor of 1000, are not a normal search.
COLLAPSE_STREAK = 10
#: Per cent of the last 100 steps; at the default growth interval, 2000, it is 0.05.
COLLAPSE_RATE, OSCILLATION_RATE = 50, 2
#: At its limit the scale grows once per growth interval, followed by a skip: up to half more skips
#: than that are not an oscillation, if they cost little.
EXPECTED, BEARABLE_RATE = 1.5, 5


class Figures(NamedTuple):
    """Figures from which the health is derived."""

    attempts: int  # all own steps of the run
    scale: float | None
    skips_100: int  # in the last 100 steps
    skips_1000: int  # in the last 1000 steps
    settled: int  # of the last 100 steps, those after the first search for a scale
    settled_skips: int  # skips among these
    settled_streaks: int  # streaks of skips among these
    streak: int  # consecutive skips up to the last step
    longest_streak: int  # in the last 1000 steps
    applied_500: int  # in the last 500 steps
    growths: int | None  # of the scale, among the settled steps; None: not known
    steps_since_skip: int | None
    steps_since_set: int | None  # since the scale was set by hand, in the last 1000 steps
    steps_since_replaced: int | None  # since a new scaler replaced the old one
    seconds_since_skip: float | None


class ScalingHealth(NamedTuple):
    """Loss-scale health of a run."""

    word: str  # calibrating, healthy, oscillating, collapsing or dead
    reason: str  # a sentence
    figures: Figures


def judge(figures: Figures, *, growth_interval: int | None = None) -> ScalingHealth:
    """Derive the health from the figures. growth_interval: None if unknown.

    The reason has facts only. Why steps were skipped is for findings to say.
    """
    allowed: float = OSCILLATION_RATE
    if growth_interval:
        allowed = max(allowed, min(EXPECTED * 100 / (growth_interval + 1), BEARABLE_RATE))
    scale = "" if figures.scale is None else f"the scale is {number_formats.scale(figures.scale)}"
    if figures.scale == 0 or (figures.applied_500 == 0 and figures.attempts >= CALIBRATING_FOR):
        word = "dead"
        applied = _fraction(figures.applied_500, min(figures.attempts, 500), figures.attempts)
        reason = f"{applied} changed the weights{scale and '; '}{scale}"
    elif figures.scale is not None and figures.scale < 1:
        word = "collapsing"
        reason = f"{scale}, below 1, where it shrinks gradients; {_describe_skips(figures)}"
    elif not figures.settled and figures.attempts <= CALIBRATING_FOR:
        word = "calibrating"
        reason = f"{_of(figures.skips_1000, figures.attempts, figures)}; calibration needs "
        reason += f"{CALIBRATED_AFTER} consecutive steps without a skip"
    elif figures.streak >= COLLAPSE_STREAK:
        word = "collapsing"
        reason = f"the last {figures.streak} steps were all skipped{scale and '; '}{scale}"
    elif 100 * figures.settled_skips > COLLAPSE_RATE * figures.settled:
        word = "collapsing"
        reason = f"{_describe_skips_since_search(figures)}{scale and '; '}{scale}"
    elif figures.settled_skips > max(1, math.ceil(allowed * figures.settled / 100)):
        word = "oscillating"
        reason = f"{_describe_skips_since_search(figures)}{_scaler_changes(figures)}"
    else:
        word, reason = "healthy", _describe_skips(figures)
    return ScalingHealth(word, f"{reason[0].upper()}{reason[1:]}.", figures)


def _describe_skips_since_search(figures: Figures) -> str:
    skips = figures.settled_skips
    return f"{_of(skips, figures.settled, figures)}, {_latest(skips, figures)}"


def _scaler_changes(figures: Figures) -> str:
    """Return what else the scaler did in the settled steps, by its recorded events."""
    if figures.steps_since_set is not None and figures.steps_since_set < figures.settled:
        return f"; the scale was set by hand {_steps(figures.steps_since_set)} ago"
    if figures.steps_since_replaced is not None:
        ago = _steps(figures.steps_since_replaced)
        return f"; a new scaler with another scale replaced the old one {ago} ago"
    if figures.settled_streaks == 1:
        return "; they were consecutive"
    if not figures.growths:  # none, or not known
        return "" if figures.growths is None else "; the scale did not grow in these steps"
    return f"; the scale grew {_times(figures.growths)} in these steps"


def _steps(count: int) -> str:
    return number_formats.quantity(count, "step")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _describe_skips(figures: Figures) -> str:
    since = figures.steps_since_skip
    if since is None:
        return "no step was skipped"
    if not figures.skips_1000:
        return f"no step was skipped in the last {_steps(since)}{_time(figures)}"
    longest = figures.longest_streak
    in_a_row = f", at most {longest} in a row" if longest > 1 else ""
    skipped = _of(figures.skips_1000, min(figures.attempts, WINDOW), figures)
    return f"{skipped}{in_a_row}, {_latest(figures.skips_1000, figures)}"


def _latest(skips: int, figures: Figures) -> str:
    """Return when the latest of some skips was."""
    if not figures.steps_since_skip:
        return "the last one" if skips == 1 else "most recently the last one"
    ago = f"{_steps(figures.steps_since_skip)}{_time(figures)} ago"
    return ago if skips == 1 else f"most recently {ago}"


def _of(skips: int, steps: int, figures: Figures) -> str:
    share = number_formats.percent(skips / max(steps, 1))
    was = "was" if skips == 1 else "were"
    return f"{_fraction(skips, steps, figures.attempts)} ({share}) {was} skipped"


def _fraction(some: int, steps: int, attempts: int) -> str:
    """Return a number of steps out of all, or out of the last ones."""
    return f"{some:,} of {'' if steps == attempts else 'the last '}{_steps(steps)}"


def _time(figures: Figures) -> str:
    seconds = figures.seconds_since_skip
    return "" if seconds is None else f" ({number_formats.duration(seconds)})"


def count(
    attempts: int,
    skips: list[int],
    scale: float | None,
    *,
    last: int | None = None,
    set_at: int | None = None,
    replaced_at: int | None = None,
    growths: Sequence[int] | None = None,
    seconds_since_skip: float | None = None,
) -> Figures:
    """Compute the figures of a run.

    skips: in the last 1000 steps, in order; last: the latest of all; growths: the steps after
    which the scale grew. All are numbered like attempts.
    """
    last = skips[-1] if skips else last
    streaks = _streaks(skips)
    settled_from = find_settled_step(attempts, skips)
    first = max(attempts - SETTLED + 1, settled_from or attempts + 1, 1)
    return Figures(
        attempts=attempts,
        scale=scale,
        skips_100=sum(step > attempts - 100 for step in skips),
        skips_1000=len(skips),
        settled=attempts - first + 1,
        settled_skips=sum(step >= first for step in skips),
        settled_streaks=len(_streaks([step for step in skips if step >= first])),
        streak=streaks[-1] if skips and skips[-1] == attempts else 0,
        longest_streak=max(streaks, default=0),
        applied_500=min(attempts, 500) - sum(step > attempts - 500 for step in skips),
        growths=None if growths is None else sum(step >= first for step in growths),
        steps_since_skip=None if last is None else attempts - last,
        steps_since_set=None if set_at is None else attempts - set_at,
        steps_since_replaced=None if replaced_at is None else attempts - replaced_at,
        seconds_since_skip=seconds_since_skip,
    )


def _streaks(skips: list[int]) -> list[int]:
    lengths: list[int] = []
    for index, step in enumerate(skips):
        if index and skips[index - 1] == step - 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def find_settled_step(attempts: int, skips: list[int]) -> int | None:
    """Return the first step after the search for a scale; None if it has not ended.

    In a run longer than the window it has ended, with or without a result.
    """
    if attempts > WINDOW:
        return 1
    for before, after in pairwise([0, *skips, attempts + 1]):
        if after - before > CALIBRATED_AFTER:
            return before + CALIBRATED_AFTER + 1
    return None if attempts <= CALIBRATING_FOR else 1
