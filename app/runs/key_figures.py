"""Figures of a run page: second lines of the tiles, and the card of the loss scaler."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from sqlalchemy import Integer, Select, bindparam, case, func, select
from sqlalchemy.orm import Session

from db.health.scaling_health import scaling_health
from db.tables import ENDED, LatestMetric, Run, ScalerEvent
from db.telemetry import latest_metrics, series, step_rows
from halfstep.number_formats import count, number

#: Names of the metric that is the second tile, the first that a run has; else `first_name`.
VALIDATION_LOSSES = (
    *(f"{kind}/loss" for kind in latest_metrics.KINDS_OF_EVALUATIONS),
    *latest_metrics.EVALUATED_LOSSES,
)
SKIPS, ORIGINS = 200, 4  # skips whose origins are counted; origins that are listed
SKIPS_LISTED = 24
SIBLINGS = 5  # metrics that differ by a number, such as of top 1 to 5, of which one is a figure


@dataclass(frozen=True)
class MetricFigure:
    """The latest point of a metric."""

    name: str
    value: float
    note: str

    @classmethod
    def of(cls, name: str, step: int, value: float | None) -> Self:
        """Return the figure of a stored point, in which NULL is NaN."""
        return cls(name, math.nan if value is None else value, f"step {count(step)}")


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

    recent: int  # skips in the last 1,000 steps, as the banner of its health counts them
    streak: int  # most of these in a row
    growth_interval: int | None
    seen: int = 0  # skips that were read, at most SKIPS
    is_cut: bool = False  # there are more
    origins: Sequence[tuple[str, int]] = ()  # where these began, with counts, most frequent first
    skips: Sequence[ListedSkip] = field(default=())  # the latest, newest first


def key_figures(session: Session, run: Run) -> KeyFigures:
    """Return the figures as of the run's last step."""
    at = {"first": run.step, "last": run.step, "most": 1}
    last = step_rows.read_rows(session, run.id, **at) if run.step else []
    last = [row.with_nan() for row in last]
    norm, clipped = (last[0].grad_norm, last[0].grad_norm_clipped) if last else (None, None)
    return KeyFigures(
        loss_note=f"step {count(run.step)}" if last else "",
        metric=_metric(session, run),
        scale_note=_scale_note(session, run),
        norm=norm,
        norm_note=_norm_note(norm, clipped),
    )


def scaler_card(session: Session, run: Run) -> ScalerCard:
    """Return the loss scaler's card."""
    health = scaling_health(session, run)
    skips = [ListedSkip.of(skip) for skip in series.skips(session, run.id, most=SKIPS)]
    origins = Counter(skip.origin for skip in skips if skip.origin)
    return ScalerCard(
        recent=health.figures.skips_1000 if health else 0,
        streak=health.figures.longest_streak if health else 0,
        growth_interval=_growth_interval(run),
        seen=len(skips),
        is_cut=run.skipped > len(skips),
        origins=origins.most_common(ORIGINS),
        skips=skips[:SKIPS_LISTED],
    )


def _norm_note(norm: float | None, clipped: float | None) -> str:
    if norm is None or clipped is None or not clipped < norm:
        return ""
    return f"clipped to {number(clipped)}"


def _metric(session: Session, run: Run) -> MetricFigure | None:
    connection, given = session.connection(), {"run_id": run.id}
    losses, first = _metric_queries()
    row = connection.execute(losses, given).first() or connection.execute(first, given).first()
    if row is None or latest_metrics.siblings(session, run.id, row.name) > SIBLINGS:
        return None  # one of many classes or layers does not stand for the run
    return MetricFigure.of(row.name, row.step, row.value)


@cache
def _metric_queries() -> tuple[Any, Any]:
    """Return the queries of the latest point of the first validation loss, and of other metrics."""
    run_id, point = bindparam("run_id", type_=Integer()), (LatestMetric.step, LatestMetric.value)
    first = latest_metrics.first_name(run_id).add_columns(*point)
    order = case({name: n for n, name in enumerate(VALIDATION_LOSSES)}, value=LatestMetric.name)
    losses = select(LatestMetric.name, *point).where(LatestMetric.run_id == run_id)
    losses = losses.where(LatestMetric.name.in_(VALIDATION_LOSSES)).order_by(order).limit(1)
    return losses, first


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
    last = session.connection().scalar(_last_event_query(), {"run_id": run.id})
    at = (last or 0) + interval
    is_within = not run.steps_total or at < run.steps_total
    return f"may grow after {count(at)}" if at > run.step and is_within else ""


@cache
def _last_event_query() -> Select[int]:
    query = select(func.max(ScalerEvent.step))
    return query.where(ScalerEvent.run_id == bindparam("run_id"))
