"""Figures of a run page: second lines of the tiles, and the card of the loss scaler."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.html.formats import count
from db.tables import ENDED, Run, ScalerEvent, Step
from db.telemetry import latest_metrics, series
from halfstep.telemetry.flags import SKIPPED

#: Names of the metric that is the second tile, the first that a run has; else `first_name`.
VALIDATION_LOSSES = (
    *("val/loss", "valid/loss", "validation/loss", "eval/loss", "test/loss"),
    *("val_loss", "eval_loss", "test_loss"),
)
LATEST_STEPS = 1000
SKIPS, ORIGINS = 200, 4  # skips whose origins are counted; origins that are listed
SKIPS_LISTED = 24


@dataclass(frozen=True)
class MetricFigure:
    """The latest point of a metric."""

    name: str
    value: float | None
    note: str


@dataclass(frozen=True)
class KeyFigures:
    """Second lines of the tiles; empty if unknown."""

    loss_note: str = ""
    metric: MetricFigure | None = None
    scale_note: str = ""
    norm: float | None = None  # unscaled, before clipping
    norm_note: str = ""


@dataclass(frozen=True)
class ListedSkip:
    """A skipped step."""

    step: int
    scale_before: float
    scale_after: float
    origin: str  # where the overflow began; empty if not recorded

    @classmethod
    def of(cls, skip: ScalerEvent) -> Self:
        """Return a row of the card.

        The backward pass visits parameters in reverse forward order, so an overflow begins at the
        last culprit.
        """
        last = skip.culprits[-1]["name"] if skip.culprits else ""
        origin = "loss" if skip.loss_nonfinite else last
        return cls(skip.step, skip.scale_before, skip.scale_after, origin)


@dataclass(frozen=True)
class ScalerCard:
    """Recent activity of the loss scaler."""

    recent: int  # skips in the latest LATEST_STEPS steps
    streak: int  # most consecutive skips among the latest SKIPS
    growth_interval: int | None
    seen: int = 0  # skips that were read, at most SKIPS
    is_cut: bool = False  # there are more
    origins: Sequence[tuple[str, int]] = ()  # where these began, with counts, most frequent first
    skips: Sequence[ListedSkip] = field(default=())  # the latest, newest first


def key_figures(session: Session, run: Run) -> KeyFigures:
    """Return the figures as of the run's last step."""
    last = session.get(Step, (run.id, run.step)) if run.step else None
    norm, clipped = (last.grad_norm, last.grad_norm_clipped) if last else (None, None)
    return KeyFigures(
        loss_note=f"step {count(run.step)}" if last else "",
        metric=_metric(session, run),
        scale_note=_scale_note(session, run),
        norm=norm,
        norm_note=_norm_note(norm, clipped),
    )


def scaler_card(session: Session, run: Run) -> ScalerCard:
    """Return the loss scaler's card."""
    recent = select(func.count()).where(
        Step.run_id == run.id,
        Step.step > run.step - LATEST_STEPS,
        Step.flags.bitwise_and(SKIPPED) != 0,
    )
    skips = [ListedSkip.of(skip) for skip in series.skips(session, run.id, most=SKIPS)]
    origins = Counter(skip.origin for skip in skips if skip.origin)
    return ScalerCard(
        recent=session.scalar(recent) or 0,
        streak=_streak(sorted({skip.step for skip in skips})),
        growth_interval=_growth_interval(run),
        seen=len(skips),
        is_cut=run.skipped > len(skips),
        origins=origins.most_common(ORIGINS),
        skips=skips[:SKIPS_LISTED],
    )


def _norm_note(norm: float | None, clipped: float | None) -> str:
    if norm is None or clipped is None:
        return ""
    return f"clipped to {clipped:.4g}" if clipped < norm else "not clipped"


def _metric(session: Session, run: Run) -> MetricFigure | None:
    points = latest_metrics.points(session, [run.id], VALIDATION_LOSSES)[run.id]
    name = next(filter(points.__contains__, VALIDATION_LOSSES), None)
    name = name or session.scalar(latest_metrics.first_name(run.id))
    if name is None:
        return None
    point = points.get(name) or latest_metrics.points(session, [run.id], [name])[run.id][name]
    return MetricFigure(name, point.value, f"step {count(point.step)}")


def _growth_interval(run: Run) -> int | None:
    interval = run.settings.get("scaler", {}).get("growth_interval")
    return interval if isinstance(interval, int) else None


def _scale_note(session: Session, run: Run) -> str:
    """Return the step after which the scale may grow, if no step overflows before."""
    interval = _growth_interval(run)
    if run.status in ENDED or not run.step or interval is None or run.precision != "fp16":
        return ""
    ceiling = run.settings["scaler"].get("ceiling")
    if ceiling is not None and run.scale is not None and run.scale >= ceiling:
        return "at its ceiling"
    query = select(func.max(ScalerEvent.step)).where(ScalerEvent.run_id == run.id)
    at = (session.scalar(query) or 0) + interval
    return f"may grow after {count(at)}" if at > run.step else ""


def _streak(steps: Sequence[int]) -> int:
    """Return the longest run of consecutive steps. steps: in order."""
    longest = length = 0
    before = None
    for step in steps:
        length = length + 1 if before is not None and step == before + 1 else 1
        longest, before = max(longest, length), step
    return longest
