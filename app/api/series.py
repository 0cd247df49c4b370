"""What a training told: series for charts, events, metrics, log lines, files."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.auth import SignedIn
from app.context import Db
from app.rows import CheckpointFile, Event, LogLine, MetricPoint
from app.thinning import MOST_POINTS, thin
from db import checkpoints, history, runs, series

router = APIRouter(prefix="/runs/{run_id}", tags=["series"])

SERIES = ("loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "step_us", "elapsed_ms")
ALL_STEPS = 2**62


class Line(BaseModel):
    """Steps and values. null is NaN; infinities are "Infinity" and "-Infinity"."""

    x: list[int]
    y: list[float | str | None]


class SeriesPage(BaseModel):
    """Series over a range of steps, as many points as a screen has use for.

    total: steps in the range; points: points of the longest series; cursor: where live news go on.
    """

    first: int
    last: int
    total: int
    points: int
    bucket: Annotated[int, Field(description="Steps that a pair of extremes stands for; 1: raw")]
    cursor: str
    series: dict[str, Line]


class FlaggedSteps(BaseModel):
    """Columns of all steps with a flag: 1 skipped, 2 loss not finite, 4 norm overflow."""

    step: list[int]
    flags: list[int]
    loss: list[float | str | None]


@router.get("/series")
def get_series(
    run_id: int,
    session: Db,
    _visitor: SignedIn,
    first: Annotated[int, Query(ge=1)] = 1,
    last: Annotated[int | None, Query(ge=1)] = None,
    points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = MOST_POINTS,
) -> SeriesPage:
    """Return the series from step first to step last."""
    run = runs.get(session, run_id)
    columns = series.raw_steps(session, run_id, first=first, last=last, most=ALL_STEPS)
    steps = columns["step"]
    lines = {}
    for name in SERIES:
        x, y = thin(steps, columns[name], points)
        lines[name] = Line(x=x, y=y)
    return SeriesPage(
        first=steps[0] if steps else first,
        last=steps[-1] if steps else first,
        total=len(steps),
        points=max(len(line.x) for line in lines.values()),
        bucket=1 if len(steps) <= points else -(-2 * len(steps) // points),
        cursor=str(history.cursor_now(session, run)),
        series=lines,
    )


@router.get("/flagged")
def get_flagged_steps(run_id: int, session: Db, _visitor: SignedIn) -> FlaggedSteps:
    """Return all steps that were skipped or not finite, never sampled."""
    runs.get(session, run_id)
    return FlaggedSteps(**history.flagged_steps(session, run_id))


@router.get("/events")
def get_events(run_id: int, session: Db, _visitor: SignedIn) -> list[Event]:
    """Return all that the scaler did, with the parameters that overflowed."""
    runs.get(session, run_id)
    return [Event.model_validate(row) for row in history.events(session, run_id)]


@router.get("/metrics")
def get_metrics(run_id: int, session: Db, _visitor: SignedIn) -> list[MetricPoint]:
    """Return all that the recipe measured."""
    runs.get(session, run_id)
    return [MetricPoint.model_validate(row) for row in series.metrics(session, run_id)]


@router.get("/log")
def get_log(
    run_id: int,
    session: Db,
    _visitor: SignedIn,
    before: Annotated[int | None, Query(description="Only lines before this number")] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
) -> list[LogLine]:
    """Return the latest lines, oldest first."""
    runs.get(session, run_id)
    rows = series.log_lines(session, run_id, before=before, most=limit)
    return [LogLine.model_validate(row) for row in rows]


@router.get("/checkpoints")
def get_checkpoints(run_id: int, session: Db, _visitor: SignedIn) -> list[CheckpointFile]:
    """Return the run's files, newest step first."""
    runs.get(session, run_id)
    return [CheckpointFile.model_validate(row) for row in checkpoints.of_run(session, run_id)]
