"""What a training told: series for charts, events, metrics, log lines, files."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth import SignedIn
from app.context import Db
from app.json_rows import CheckpointFile, Event, LogLine, MetricPoint
from app.parameters import RunId, Step
from db import checkpoints, history, runs, series, windows
from db.pyramid import STEP_SERIES

router = APIRouter(prefix="/runs/{run_id}", tags=["series"])

SERIES = (*(each.name for each in STEP_SERIES), "elapsed_ms")
MOST_POINTS = 5000
LEAST_POINTS = 32


class Line(BaseModel):
    """Steps and values. null is NaN; infinities are "Infinity" and "-Infinity"."""

    x: list[int]
    y: list[float | str | None]
    mean_x: Annotated[list[int], Field(description="Middles of buckets, where points are few")] = []
    mean_y: list[float | str | None] = []


class Ticks(BaseModel):
    """What happened at steps; where there are more than 5,000, counted in buckets by their first.

    total: exactly how often in the range, and the sum of counts; before: how often before it.
    """

    steps: list[int] = []
    counts: list[int] = []
    total: int = 0
    before: int = 0


class SeriesPage(BaseModel):
    """Series over a range of steps, as many points as a screen has use for.

    total: steps in the range; points: points of the longest series; cursor: where live news go on.
    metrics: what the recipe measured, in the same way.
    """

    parent_step: Annotated[int, Field(description="Of a fork: own steps are those after it")]
    first: int
    last: int
    total: int
    points: int
    bucket: Annotated[int, Field(description="Steps that share a lowest and a highest; 1: raw")]
    cursor: str
    series: dict[str, Line]
    metrics: dict[str, Line]
    skips: Ticks
    nonfinite: Annotated[Ticks, Field(description="Steps whose loss was not finite")]
    resumptions: Annotated[
        dict[int, int], Field(description="By attempt, the last step before its own")
    ]


class FlaggedSteps(BaseModel):
    """Columns of steps with a flag: 1 skipped, 2 loss not finite."""

    step: list[int]
    flags: list[int]
    loss: list[float | str | None]


@router.get("/series")
def get_series(
    run_id: RunId,
    session: Db,
    _visitor: SignedIn,
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=LEAST_POINTS, le=MOST_POINTS)] = MOST_POINTS,
) -> SeriesPage:
    """Return the series from step first to step last."""
    run = runs.get(session, run_id)
    cursor = str(history.cursor_now(session, run))
    resumptions = history.resumptions(session, run_id)
    measured = windows.metrics(session, run_id, first=first, last=last, most=points)
    window = windows.window(session, run_id, first=first, last=last, most=points)
    if window is None:
        return SeriesPage(
            parent_step=run.parent_step or 0,
            first=first,
            last=first,
            total=0,
            points=0,
            bucket=1,
            cursor=cursor,
            series={name: Line(x=[], y=[]) for name in SERIES},
            metrics=_lines(measured),
            skips=Ticks(),
            nonfinite=Ticks(),
            resumptions=resumptions,
        )
    loss = window.series["loss"]
    return SeriesPage(
        parent_step=run.parent_step or 0,
        first=window.first,
        last=window.last,
        total=window.total,
        points=window.points,
        bucket=window.bucket,
        cursor=cursor,
        series=_lines(window.series) | {"elapsed_ms": Line(**window.elapsed_ms)},
        metrics=_lines(measured),
        skips=_ticks(window.skips, before=_skips_before(session, run_id, window.first)),
        nonfinite=_ticks(loss.nonfinite),
        resumptions=resumptions,
    )


def _lines(lines: dict[str, windows.Line]) -> dict[str, Line]:
    return {
        name: Line(x=line.x, y=line.y, mean_x=line.mean_x, mean_y=line.mean_y)
        for name, line in lines.items()
    }


def _ticks(ticks: windows.Ticks, before: int = 0) -> Ticks:
    return Ticks(steps=ticks.steps, counts=ticks.counts, total=ticks.total, before=before)


def _skips_before(session: Session, run_id: int, step: int) -> int:
    """Count the skipped steps before a step, which says how many updates were applied by then."""
    before = windows.window(session, run_id, last=step - 1, most=LEAST_POINTS)
    return before.skips.total if before else 0


@router.get("/flagged")
def get_flagged_steps(run_id: RunId, session: Db, _visitor: SignedIn) -> FlaggedSteps:
    """Return all steps that were skipped or not finite, never sampled."""
    runs.get(session, run_id)
    return FlaggedSteps(**history.flagged_steps(session, run_id))


@router.get("/events")
def get_events(run_id: RunId, session: Db, _visitor: SignedIn) -> list[Event]:
    """Return all that the scaler did, with the parameters that overflowed."""
    runs.get(session, run_id)
    return [Event.model_validate(row) for row in history.events(session, run_id)]


@router.get("/metrics")
def get_metrics(run_id: RunId, session: Db, _visitor: SignedIn) -> list[MetricPoint]:
    """Return all that the recipe measured."""
    runs.get(session, run_id)
    return [MetricPoint.model_validate(row) for row in series.metrics(session, run_id)]


@router.get("/log")
def get_log(
    run_id: RunId,
    session: Db,
    _visitor: SignedIn,
    before: Annotated[Step | None, Query(description="Only lines before this number")] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> list[LogLine]:
    """Return the latest lines, oldest first."""
    runs.get(session, run_id)
    rows = series.log_lines(session, run_id, before=before, most=limit)
    return [LogLine.model_validate(row) for row in rows]


@router.get("/checkpoints")
def get_checkpoints(run_id: RunId, session: Db, _visitor: SignedIn) -> list[CheckpointFile]:
    """Return the run's files, newest step first."""
    runs.get(session, run_id)
    return [CheckpointFile.model_validate(row) for row in checkpoints.of_run(session, run_id)]
