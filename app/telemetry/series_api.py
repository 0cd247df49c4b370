"""What a training told: series for charts, events, metrics, log lines, files."""

from collections.abc import Collection
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import requires
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId, Step
from app.http.responses import written
from app.live.json_rows import CheckpointFileRow, Event, LogLine, MetricPoint
from app.telemetry.metric_names import Choice, Chosen
from db.access.permissions import Permission
from db.files import checkpoints
from db.health.spikes import spikes
from db.runs import history, runs
from db.tables import Run
from db.telemetry import series, windows
from db.telemetry.pyramid import STEP_SERIES

router = APIRouter(prefix="/runs/{run_id}", tags=["series"])

SERIES = (*(each.name for each in STEP_SERIES), "elapsed_ms")
MOST_POINTS = 5000
LEAST_POINTS = 32


class Line(BaseModel):
    """Values and their steps. null is NaN; infinities are "Infinity" and "-Infinity".

    x, mean_x: null if they are the page's. mean_y: means of buckets, where points are few.
    """

    x: list[int] | None
    y: list[float | str | None]
    mean_x: Annotated[list[int] | None, Field(description="Middles of buckets")] = None
    mean_y: list[float | str | None] = []


class Ticks(BaseModel):
    """What happened at steps; where there are more than 5,000, counted in buckets by their first.

    total: exactly how often in the range, and the sum of counts; before: how often before it.
    """

    steps: list[int] = []
    counts: list[int] = []
    total: int = 0
    before: int = 0


class Spike(BaseModel):
    """A sudden rise of the loss. z: robust standard deviations above the median before it."""

    step: int
    loss: float | str
    z: float | str
    rolled_back_to: Annotated[
        int | None, Field(description="Step that the run went back to for it")
    ]


class SeriesWindow(BaseModel):
    """Series over a range of steps, as many points as a screen has use for.

    x, mean_x: of all series without their own; extremes of buckets have them at steps of their own.
    total: steps in the range; points: points of the longest series.
    metrics: what the recipe measured, in the same way.
    """

    parent_step: Annotated[int, Field(description="Of a fork: own steps are those after it")]
    first: int
    last: int
    total: int
    points: int
    bucket: Annotated[int, Field(description="Steps that share a lowest and a highest; 1: raw")]
    x: list[int]
    mean_x: list[int]
    series: dict[str, Line]
    metrics: dict[str, Line]
    skips: Ticks
    nonfinite: Annotated[Ticks, Field(description="Steps whose loss was not finite")]


class SeriesPage(SeriesWindow):
    """Series of one run. cursor: where live news go on.

    metrics: a page of them, in order of name. metrics_total: of all pages; metrics_next: what
    `metric_after` is for the next one, null on the last.
    """

    metrics_total: int
    metrics_next: str | None
    cursor: str
    resumptions: Annotated[
        dict[int, int], Field(description="By attempt, the last step before its own")
    ]
    spikes: Annotated[list[Spike], Field(description="The latest 200 of the whole run")]


class Events(ListPage):
    """What the scaler did, in order of step."""

    events: list[Event]


class Metrics(ListPage):
    """What the recipe measured, in order of step."""

    metrics: list[MetricPoint]


class Log(BaseModel):
    """Lines, oldest first. total: of all pages; next: what `before` is for the page of those before
    these, null where there are none.
    """

    log: list[LogLine]
    total: int
    next: int | None


class Checkpoints(ListPage):
    """Files, newest step first."""

    checkpoints: list[CheckpointFileRow]


class FlaggedSteps(BaseModel):
    """Columns of steps with a flag: 1 skipped, 2 loss not finite.

    total: of all pages; next: the step that `after` is for the next one, null on the last.
    """

    total: int
    next: int | None
    step: list[int]
    flags: list[int]
    loss: list[float | str | None]


@router.get("/series", response_model=SeriesPage)
@requires(Permission.VIEW_RUN)
def get_series(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    chosen: Chosen,
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=LEAST_POINTS, le=MOST_POINTS)] = MOST_POINTS,
) -> Response:
    """Return the series from step first to step last, and those of a page of metrics."""
    return written(page_of_series(session, run_id, first, last, points, chosen))


def page_of_series(
    session: Session, run_id: int, first: int, last: int | None, points: int, chosen: Choice
) -> SeriesPage:
    """Read what charts of a run draw."""
    run = runs.get(session, run_id)
    cursor = str(history.cursor_now(session, run))
    resumptions = history.resumptions(session, run_id)
    found = [Spike.model_validate(each) for each in spikes(session, run_id)]
    metrics = chosen.names(session, run_id)
    drawn = windows_of(session, [run], first, last, points, metrics=metrics.names)[run_id]
    return SeriesPage(
        **dict(drawn),
        cursor=cursor,
        resumptions=resumptions,
        spikes=found,
        metrics_total=metrics.total,
        metrics_next=metrics.next,
    )


def windows_of(
    session: Session,
    some_runs: Collection[Run],
    first: int,
    last: int | None,
    points: int,
    names: Collection[str] | None = None,
    metrics: Collection[str] | None = None,
) -> dict[int, SeriesWindow]:
    """Read series of runs. names: only these, and elapsed_ms, without which there is no time.

    metrics: those of metrics, if they are others.
    """
    ids = [run.id for run in some_runs]
    found = windows.windows_of(session, ids, first=first, last=last, most=points, names=names)
    measured = windows.metrics_of_runs(
        session,
        ids,
        first=first if first > 1 else None,  # metrics may begin before the first step
        last=last,
        most=points,
        names=names if metrics is None else metrics,
    )
    before = _skips_before(session, ids, first)
    wanted = set(SERIES) if names is None else {*names, "elapsed_ms"}
    return {
        run.id: _window(run, found[run.id], measured[run.id], before[run.id], wanted)
        if run.id in found
        else _logged(run, measured[run.id], first, wanted)
        for run in some_runs
    }


def _window(
    run: Run,
    window: windows.Window,
    measured: dict[str, windows.Line],
    skips_before: int,
    wanted: set[str],
) -> SeriesWindow:
    loss = window.series["loss"]
    lines = window.series | {"elapsed_ms": window.elapsed_ms}
    return SeriesWindow(
        parent_step=run.parent_step or 0,
        first=window.first,
        last=window.last,
        total=window.total,
        points=window.points,
        bucket=window.bucket,
        x=loss.x,
        mean_x=loss.mean_x,
        series=_lines({name: line for name, line in lines.items() if name in wanted}, loss),
        metrics=_lines(measured),
        skips=_ticks(window.skips, before=skips_before),
        nonfinite=_ticks(loss.nonfinite),
    )


def _logged(
    run: Run, measured: dict[str, windows.Line], first: int, wanted: set[str]
) -> SeriesWindow:
    """Tell of a run that only logs: its steps are those of its metrics."""
    logged = [line.x[-1] for line in measured.values() if line.x]
    return SeriesWindow(
        parent_step=run.parent_step or 0,
        first=first,
        last=max([first, *logged]),
        total=0,
        points=0,
        bucket=1,
        x=[],
        mean_x=[],
        series={name: Line(x=None, y=[]) for name in SERIES if name in wanted},
        metrics=_lines(measured),
        skips=Ticks(),
        nonfinite=Ticks(),
    )


def _lines(lines: dict[str, windows.Line], first: windows.Line | None = None) -> dict[str, Line]:
    """Return lines for an answer; what their steps share with a first line stands there once."""
    # Our own numbers: to check each of them would take longer than to read it.
    return {
        name: Line.model_construct(
            x=None if first and line.x == first.x else line.x,
            y=line.y,
            mean_x=None if first and line.mean_x == first.mean_x else line.mean_x,
            mean_y=line.mean_y,
        )
        for name, line in lines.items()
    }


def _ticks(ticks: windows.Ticks, before: int = 0) -> Ticks:
    return Ticks(steps=ticks.steps, counts=ticks.counts, total=ticks.total, before=before)


def _skips_before(session: Session, ids: list[int], step: int) -> dict[int, int]:
    """Count the skipped steps before a step, which says how many updates were applied by then."""
    if step == 1:
        return dict.fromkeys(ids, 0)
    found = windows.windows_of(session, ids, last=step - 1, most=LEAST_POINTS, names=())
    return {run_id: found[run_id].skips.total if run_id in found else 0 for run_id in ids}


@router.get("/flagged")
@requires(Permission.VIEW_RUN)
def get_flagged_steps(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    after: Annotated[Step | None, Query(description="Only steps after this one")] = None,
    limit: Limit = 5000,
) -> FlaggedSteps:
    """Return the steps that were skipped or not finite, never sampled."""
    runs.get(session, run_id)
    columns = history.flagged_steps(session, run_id, after=after or 0, limit=limit)
    return FlaggedSteps(
        **columns,
        total=history.count_flagged(session, run_id),
        next=columns["step"][-1] if len(columns["step"]) == limit else None,
    )


@router.get("/events")
@requires(Permission.VIEW_RUN)
def get_events(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Events:
    """Return what the scaler did, with the parameters that overflowed."""
    runs.get(session, run_id)
    found = history.events(session, run_id, after=after, limit=limit)
    events = [Event.model_validate(row) for (row,) in found.rows]
    return Events(events=events, total=found.total, next=found.next)


class MetricSummary(BaseModel):
    """A metric summed up: its latest value and step, the finite extremes, its points."""

    name: str
    step: int
    value: float | str | None
    low: float | None
    high: float | None
    points: int


class MetricSummaries(ListPage):
    """Metrics, in order of name."""

    metrics: list[MetricSummary]


@router.get("/metrics/summary")
@requires(Permission.VIEW_RUN)
def get_metrics_summary(
    run_id: RunId, session: Db, _principal: SignedIn, chosen: Chosen
) -> MetricSummaries:
    """Sum up a page of the run's metrics; `next` is what `metric_after` is for the next one."""
    runs.get(session, run_id)
    found = chosen.names(session, run_id)
    rows = windows.measured(session, run_id, names=found.names)
    metrics = [
        MetricSummary(**vars(row) | {"value": series.json_number(row.value)}) for row in rows
    ]
    return MetricSummaries(metrics=metrics, total=found.total, next=found.next)


@router.get("/metrics")
@requires(Permission.VIEW_RUN)
def get_metrics(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Metrics:
    """Return what was measured, in the order in which it was recorded."""
    runs.get(session, run_id)
    found = series.metrics(session, run_id, after=after, limit=limit)
    metrics = [MetricPoint.model_validate(row) for (row,) in found.rows]
    return Metrics(metrics=metrics, total=found.total, next=found.next)


@router.get("/log")
@requires(Permission.VIEW_RUN)
def get_log(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    before: Annotated[Step | None, Query(description="Only lines before this number")] = None,
    limit: Limit = 1000,
) -> Log:
    """Return the latest lines."""
    runs.get(session, run_id)
    lines = series.log_lines(session, run_id, before=before, most=limit)
    return Log(
        log=[LogLine.model_validate(row) for row in lines],
        total=series.count_log_lines(session, run_id),
        next=lines[0].number if len(lines) == limit else None,
    )


@router.get("/checkpoints")
@requires(Permission.VIEW_RUN)
def get_checkpoints(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Checkpoints:
    """Return the run's files."""
    runs.get(session, run_id)
    found = checkpoints.page_of_run(session, run_id, after=after, limit=limit)
    files = [CheckpointFileRow.model_validate(row) for (row,) in found.rows]
    return Checkpoints(checkpoints=files, total=found.total, next=found.next)
