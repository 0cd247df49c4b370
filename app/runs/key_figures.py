"""Figures of a run page: second lines of the tiles, and the card of the loss scaler."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.html.formats import count
from db.tables import ENDED, SKIPPED, Run, ScalerEvent, Step
from db.telemetry import latest_metrics, series

#: Part of the name of the metric that is shown beside the training loss, if there is one.
PREFERRED_METRIC = "/loss"
LATEST_STEPS = 1000
SKIPS, CULPRITS = 200, 4  # skips that culprits are counted in; culprits that are listed
SKIPS_LISTED = 24


@dataclass(frozen=True)
class MetricFigure:
    """The latest point of a metric."""

    name: str
    value: float | None
    note: str


@dataclass(frozen=True)
class KeyFigures:
    """Second lines of the tiles; empty where nothing is known. norm: unscaled, before the clip."""

    loss_note: str = ""
    metric: MetricFigure | None = None
    scale_note: str = ""
    norm: float | None = None
    norm_note: str = ""


@dataclass(frozen=True)
class ScalerCard:
    """What the loss scaler did of late.

    recent: skips in the latest LATEST_STEPS steps.  streak: most skips in a row among the latest
    SKIPS.  culprits: parameters by the number of these skips in which they overflowed.  seen:
    number of the skips that were read; is_cut: there are more.
    """

    recent: int
    streak: int
    growth_interval: int | None
    seen: int = 0
    is_cut: bool = False
    culprits: Sequence[tuple[str, int]] = ()
    skips: Sequence[ScalerEvent] = field(default=())


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
    skips = series.skips(session, run.id, most=SKIPS)
    named = Counter(name for skip in skips for name in {each["name"] for each in skip.culprits})
    return ScalerCard(
        recent=session.scalar(recent) or 0,
        streak=_streak(sorted({skip.step for skip in skips})),
        growth_interval=_growth_interval(run),
        seen=len(skips),
        is_cut=run.skipped > len(skips),
        culprits=named.most_common(CULPRITS),
        skips=skips[:SKIPS_LISTED],
    )


def _norm_note(norm: float | None, clipped: float | None) -> str:
    if norm is None or clipped is None:
        return ""
    return f"clipped to {clipped:.4g}" if clipped < norm else "not clipped"


def _metric(session: Session, run: Run) -> MetricFigure | None:
    for search in (PREFERRED_METRIC, ""):
        page = latest_metrics.page_of_names(session, run.id, search=search, limit=8)
        names = [name for name in page.names if not name.startswith("run/")]
        if names:
            point = latest_metrics.points(session, [run.id], names[:1])[run.id][names[0]]
            return MetricFigure(names[0], point.value, f"step {count(point.step)}")
    return None


def _growth_interval(run: Run) -> int | None:
    interval = run.settings.get("scaler", {}).get("growth_interval")
    return interval if isinstance(interval, int) else None


def _scale_note(session: Session, run: Run) -> str:
    """Return when the scale grows next, if nothing overflows until then."""
    interval = _growth_interval(run)
    if run.status in ENDED or not run.step or interval is None or run.precision != "fp16":
        return ""
    query = select(func.max(ScalerEvent.step)).where(ScalerEvent.run_id == run.id)
    at = (session.scalar(query) or 0) + interval
    return f"grows after step {count(at)}" if at > run.step else ""


def _streak(steps: Sequence[int]) -> int:
    """Return the longest run of consecutive steps. steps: in order."""
    longest = length = 0
    before = None
    for step in steps:
        length = length + 1 if before is not None and step == before + 1 else 1
        longest, before = max(longest, length), step
    return longest
