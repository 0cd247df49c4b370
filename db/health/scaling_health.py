"""Loss-scale health of a run, and the figures from which it is derived."""

import math
from collections.abc import Collection, Iterable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, null, select, union_all
from sqlalchemy.orm import Session

from db.tables import FLAGGED, RECIPE, Diagnosis, Run, ScalerEvent, Step
from db.telemetry.scales import in_words
from halfstep.telemetry.flags import NONFINITE_LOSS, NORM_OVERFLOW, NOT_STEPPED, SKIPPED

WINDOW = 1000
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
ZERO_STEPS = 50  # in a row with all gradients 0: nothing is learned


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
    steps_since_skip: int | None
    steps_since_set: int | None  # since the scale was set by hand, in the last 1000 steps
    steps_since_replaced: int | None  # since a new scaler replaced the old one
    seconds_since_skip: float | None


class ScalingHealth(NamedTuple):
    """Loss-scale health of a run."""

    word: str  # calibrating, healthy, oscillating, collapsing or dead
    reason: str  # a sentence
    figures: Figures


def scaling_health(session: Session, run: Run) -> ScalingHealth | None:
    """Return the health of a run; None without a loss scale or without steps."""
    return health_of_runs(session, [run]).get(run.id)


def health_of_runs(session: Session, some_runs: Collection[Run]) -> dict[int, ScalingHealth]:
    """Return the health of each run that has a loss scale and steps."""
    scaled_runs = [run for run in some_runs if run.own_steps and has_scaler(run)]
    figures_by_run = figures_of(session, scaled_runs) if scaled_runs else {}
    lost = _lost_weights(session, scaled_runs)
    intervals = {
        run.id: run.settings.get("scaler", {}).get("growth_interval") for run in scaled_runs
    }
    runs = {run.id: run for run in scaled_runs}
    return {
        run_id: _unlearning(runs[run_id], figures, has_lost_weights=run_id in lost)
        or judge(figures, growth_interval=intervals[run_id])
        for run_id, figures in figures_by_run.items()
    }


def _lost_weights(session: Session, some_runs: Collection[Run]) -> set[int]:
    """Return the runs that applied their last step with non-finite loss and gradients."""
    ids = [
        run.id
        for run in some_runs
        if run.last_flags & NONFINITE_LOSS
        and not run.last_flags & (SKIPPED | NOT_STEPPED | NORM_OVERFLOW)
    ]
    norms = select(Step.run_id, Step.grad_norm).join(Run, Run.id == Step.run_id)
    norms = norms.where(Step.run_id.in_(ids), Step.step == Run.step)
    rows = session.execute(norms) if ids else ()
    return {run_id for run_id, norm in rows if norm is None or math.isinf(norm)}  # NULL: NaN


def _unlearning(run: Run, figures: Figures, *, has_lost_weights: bool) -> ScalingHealth | None:
    """Return the health of a run with only zero gradients, no applied step or lost weights."""
    if run.zero_steps >= ZERO_STEPS:
        reason = f"All gradients were 0 in the last {run.zero_steps:,} steps."
    elif run.not_stepped and run.not_stepped + run.skipped >= run.own_steps:
        left_out = f"{run.not_stepped:,} of {run.own_steps:,} steps"
        reason = f"The loop left out {left_out}, and none was applied."
    elif has_lost_weights:
        reason = "The last step was applied with a loss and gradients that are not finite."
    else:
        return None
    return ScalingHealth("dead", reason, figures)


def has_scaler(run: Run) -> bool:
    """Return whether a run scales its loss; a script's precision does not show that."""
    return (
        is_scaled(run.settings)
        if run.source == RECIPE
        else (run.scale not in (None, 1.0) or run.skipped > 0)
    )


def is_scaled(config: dict[str, Any]) -> bool:
    """Return whether a configuration has a loss scale."""
    return config["precision"] == "fp16" and bool(config.get("scaler", {}).get("enabled", True))


def judge(figures: Figures, *, growth_interval: int | None = None) -> ScalingHealth:
    """Derive the health from the figures. growth_interval: None if unknown."""
    allowed: float = OSCILLATION_RATE
    if growth_interval:
        allowed = max(allowed, min(EXPECTED * 100 / (growth_interval + 1), BEARABLE_RATE))
    window = min(figures.attempts, 500)
    scale = "" if figures.scale is None else in_words(figures.scale)
    if figures.scale == 0 or (figures.applied_500 == 0 and figures.attempts >= CALIBRATING_FOR):
        word = "dead"
        reason = f"{figures.applied_500} of the last {window} steps changed the weights"
        reason += f"; the scale is {scale}" if scale else ""
    elif figures.scale is not None and figures.scale < 1:
        word = "collapsing"
        reason = f"the scale is {scale}, below 1, where it shrinks gradients; "
        reason += _skipped(figures)
    elif not figures.settled and figures.attempts <= CALIBRATING_FOR:
        word = "calibrating"
        reason = (
            f"{_of(figures.skips_1000, figures.attempts)} skipped during the search for a scale, "
        )
        reason += f"which ends after {CALIBRATED_AFTER} steps in a row without a skip"
    elif figures.streak >= COLLAPSE_STREAK:
        word = "collapsing"
        reason = f"the last {figures.streak} steps were all skipped, each with a smaller scale"
    elif 100 * figures.settled_skips > COLLAPSE_RATE * figures.settled:
        word = "collapsing"
        reason = f"{_skipped(figures)}, and more than half of the last 100"
    elif figures.settled_skips > 1 and 100 * figures.settled_skips > allowed * figures.settled:
        word = "oscillating"
        reason = f"{_of(figures.settled_skips, figures.settled)} skipped: {_cause(figures)}; "
        reason += _skipped(figures)
    else:
        word, reason = "healthy", _skipped(figures)
    return ScalingHealth(word, f"{reason[0].upper()}{reason[1:]}.", figures)


def _cause(figures: Figures) -> str:
    if figures.steps_since_set is not None and figures.steps_since_set < figures.settled:
        return f"the scale was set by hand {_steps(figures.steps_since_set)} ago"
    if figures.steps_since_replaced is not None:
        ago = _steps(figures.steps_since_replaced)
        return f"a new scaler, of another scale, replaced the old one {ago} ago"
    if figures.settled_streaks == 1:
        return "one after another, and none since" if not figures.streak else "one after another"
    return "the scale repeatedly grows beyond its limit and falls back"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _skipped(figures: Figures) -> str:
    if figures.steps_since_skip is None:
        return "no step was skipped"
    if not figures.skips_1000:
        return f"no skip for {_steps(figures.steps_since_skip)}{_seconds(figures)}"
    ago = f"{_steps(figures.steps_since_skip)}{_seconds(figures)} ago"
    if figures.steps_since_skip == 0:
        ago = "just now"
    longest = figures.longest_streak
    in_a_row = f", at most {longest} in a row" if longest > 1 else ""
    skipped = _of(figures.skips_1000, min(figures.attempts, WINDOW))
    return f"{skipped} skipped{in_a_row}, the last {ago}"


def _of(skips: int, steps: int) -> str:
    return f"{skips:,} of the last {steps:,} steps ({_per_cent(skips, steps)} %)"


def _per_cent(skips: int, steps: int) -> str:
    share = 100 * skips / max(steps, 1)
    return f"{share:.0f}" if share >= 10 else f"{share:.2g}"


def _seconds(figures: Figures) -> str:
    seconds = figures.seconds_since_skip
    return "" if seconds is None else f" ({seconds:.3g} s)"


def figures(session: Session, run: Run) -> Figures:
    """Read the figures of one run."""
    return figures_of(session, [run])[run.id]


def figures_of(session: Session, some_runs: Collection[Run]) -> dict[int, Figures]:
    """Read the figures of runs, in one query of a few rows per run.

    It reads the partial index of skips, so long runs cost no more.
    """
    latest, result = _latest_skips(session, some_runs), {}
    for run in some_runs:
        first = run.parent_step or 0  # only a fork's own steps count
        last, last_ms, end_ms, set_at, replaced_at = latest.ends[run.id]
        result[run.id] = count(
            run.own_steps,
            [step - first for step in latest.steps.get(run.id, ())],
            run.scale,
            last=None if last is None else last - first,
            set_at=None if set_at is None else set_at - first,
            replaced_at=None if replaced_at is None else replaced_at - first,
            seconds_since_skip=_seconds_between(last_ms, end_ms) if last != run.step else None,
        )
    return result


def _seconds_between(start_ms: int | None, end_ms: int | None) -> float | None:
    return None if start_ms is None or end_ms is None else (end_ms - start_ms) / 1000


class _Latest(NamedTuple):
    """Latest skips of runs."""

    steps: dict[int, list[int]]  # skips in the last 1000 steps
    # By run: its latest skip, the times of that and of its last step, and the steps at which the
    # scale was last set by hand and the scaler last replaced.
    ends: dict[int, Any]


def _latest_skips(session: Session, some_runs: Collection[Run]) -> _Latest:
    latest = _Latest({}, {})
    ids = {"run_ids": [run.id for run in some_runs]}
    rows: Iterable[Any] = session.execute(_latest_skips_query(), ids)
    for run_id, step, *end in rows:
        if step is None:
            latest.ends[run_id] = end
        else:
            latest.steps.setdefault(run_id, []).append(step)
    for steps in latest.steps.values():
        steps.sort()
    return latest


@cache  # slow to build, and every list needs it
def _latest_skips_query() -> Any:
    mine = Run.id.in_(bindparam("run_ids", expanding=True))
    skipped = and_(Step.run_id == Run.id, FLAGGED["skipped"])
    # Without the hint SQLite reads all steps instead of this partial index.
    recent = (
        select(Run.id, Step.step, *[null()] * 5)
        .join(Step, skipped & (Step.step > Run.step - WINDOW))
        .with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
        .where(mine)
    )

    def newest(column: Any) -> Any:
        skips = select(column).with_hint(Step, "INDEXED BY ix_steps_skipped", "sqlite")
        skips = skips.where(skipped).order_by(Step.step.desc()).limit(1)
        return skips.correlate(Run).scalar_subquery()

    at_end = select(Step.elapsed_ms).where(Step.run_id == Run.id, Step.step == Run.step)
    end = at_end.correlate(Run).scalar_subquery()

    def latest(table: Any, kind: str) -> Any:
        query = select(table.step).where(table.run_id == Run.id, table.kind == kind)
        query = query.where(table.step > Run.step - WINDOW).order_by(table.step.desc()).limit(1)
        return query.correlate(Run).scalar_subquery()

    by_hand, replaced = latest(ScalerEvent, "set"), latest(Diagnosis, "scaler_replaced")
    columns = (newest(Step.step), newest(Step.elapsed_ms), end, by_hand, replaced)
    return union_all(recent, select(Run.id, null(), *columns).where(mine))


def count(
    attempts: int,
    skips: list[int],
    scale: float | None,
    *,
    last: int | None = None,
    set_at: int | None = None,
    replaced_at: int | None = None,
    seconds_since_skip: float | None = None,
) -> Figures:
    """Compute the figures of a run.

    skips: in the last 1000 steps, in order; last: the latest of all. Both are numbered like
    attempts.
    """
    last = skips[-1] if skips else last
    streaks = _streaks(skips)
    settled_from = _settled_from(attempts, skips)
    first = max(attempts - 99, settled_from or attempts + 1, 1)
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


def _settled_from(attempts: int, skips: list[int]) -> int | None:
    """Return the first step after the search for a scale; None if it has not ended.

    In a run longer than the window it has ended, with or without a result.
    """
    if attempts > WINDOW:
        return 1
    for before, after in pairwise([0, *skips, attempts + 1]):
        if after - before > CALIBRATED_AFTER:
            return before + CALIBRATED_AFTER + 1
    return None if attempts <= CALIBRATING_FOR else 1
