"""Routes of a run's recorded data: series, events, metrics, log lines, files."""

from collections.abc import Collection
from typing import Annotated

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from app.auth.routing import Router
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import DocumentedModel, Name, RunId, Step
from app.http.responses import serialize
from app.live.json_rows import CheckpointFileRow, Event, LogLine, MetricPoint
from app.telemetry.metric_names import Choice, Chosen, NamedMetrics
from db.access.permissions import Permission
from db.files import checkpoints
from db.health.spikes import spikes
from db.runs import history, runs
from db.tables import Run
from db.telemetry import latest_metrics, series, windows
from db.telemetry.pyramid import STEP_SERIES
from halfstep.telemetry.plain_json import json_safe

router = Router(prefix="/runs/{run_id}", tags=["series"])

SERIES = (*(series.name for series in STEP_SERIES), "elapsed_ms")
MOST_POINTS = 5000
LEAST_POINTS = 32
#: Names of metrics in one response.
MOST_NAMES = 5000


class Ticks(BaseModel):
    """Steps with an event; buckets with counts if there are more than points."""

    steps: Annotated[list[int], Field(description="Steps, or first steps of buckets")] = []
    counts: list[int] = []
    total: Annotated[int, Field(description="Exact number in the range")] = 0
    before: Annotated[int, Field(description="Number before the range")] = 0


class Line(BaseModel):
    """Values and their steps.

    null is unknown; values that JSON lacks are "NaN", "Infinity" and "-Infinity".
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    x: Annotated[list[int] | None, Field(description="Steps; null: those of the page")]
    y: list[float | str | None]
    mean_x: list[int] | None = None
    """Middles of buckets; null: those of the page"""
    mean_y: list[float | str | None] = []
    """Means of buckets; empty in a raw window"""
    nonfinite: Ticks | None = None
    """Non-finite values of buckets, which y lacks; null if there are none"""


class Spike(DocumentedModel):
    """A sudden rise of the loss."""

    step: int
    loss: float | str
    z: float | str
    """Robust standard deviations above the median before it"""
    rolled_back_to: Annotated[int | None, Field(description="Step of the rollback, if any")]


class SeriesWindow(BaseModel):
    """Series over a range of steps, downsampled for a screen."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    parent_step: int
    """For a fork: step of its checkpoint, after which its own steps begin"""
    first: int
    last: int
    total: Annotated[int, Field(description="Steps in the range")]
    points: Annotated[int, Field(description="Points of the longest series")]
    bucket: Annotated[int, Field(description="Steps per minimum and maximum; 1: raw")]
    x: Annotated[list[int], Field(description="Steps of all series without their own")]
    mean_x: list[int]
    """Middles of buckets of all series without their own"""
    series: dict[str, Line]
    metrics: dict[str, Line]
    skips: Ticks
    nonfinite: Annotated[Ticks, Field(description="Steps with a non-finite loss")]
    damaged: list[list[int]] = []
    """First and last step of each damaged block, whose steps are left out"""


class SeriesPage(SeriesWindow):
    """Series of one run, with a page of its metrics in order of name."""

    metrics_total: Annotated[int, Field(description="On all pages")]
    metrics_next: str | None
    """`metric_after` of the next page; null on the last"""
    cursor: Annotated[str, Field(description="Position for live updates")]
    resumptions: dict[int, int]
    """By attempt, the last step before its own"""
    spikes: Annotated[list[Spike], Field(description="The latest 200 of the whole run")]


class MetricSeries(BaseModel):
    """Metrics over a range of steps, downsampled for a screen."""

    metrics: dict[str, Line]
    cursor: Annotated[str, Field(description="Position for live updates")]


class MetricNames(ListPage):
    """Names of metrics, in order."""

    names: list[str]


class Events(ListPage):
    """Scaler events in order of step."""

    events: list[Event]


class Metrics(ListPage):
    """Metric points in order of name and step."""

    metrics: list[MetricPoint]


class Log(BaseModel):
    """Log lines, oldest first."""

    log: list[LogLine]
    total: Annotated[int, Field(description="Lines on all pages")]
    next: Annotated[
        int | None, Field(description="`before` for the page of earlier lines; null if none")
    ]


class Checkpoints(ListPage):
    """Files, newest step first."""

    checkpoints: list[CheckpointFileRow]


class FlaggedSteps(BaseModel):
    """Columns of steps with a flag: 1 skipped, 2 loss not finite."""

    total: Annotated[int, Field(description="Steps on all pages")]
    next: Annotated[int | None, Field(description="`after` for the next page; null on the last")]
    step: list[int]
    flags: list[int]
    loss: list[float | str | None]


@router.get("/series", Permission.VIEW_RUN, response_model=SeriesPage)
def get_series(
    run_id: RunId,
    session: Db,
    chosen: Chosen,
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=LEAST_POINTS, le=MOST_POINTS)] = MOST_POINTS,
) -> Response:
    """Return the series from step first to step last, and those of a page of metrics."""
    return serialize(page_of_series(session, run_id, first, last, points, chosen))


def page_of_series(
    session: Session, run_id: int, first: int, last: int | None, points: int, chosen: Choice
) -> SeriesPage:
    """Read the data for the charts of a run."""
    run = runs.get(session, run_id)
    cursor = str(history.cursor_now(session, run))
    resumptions = history.resumptions(session, run_id)
    loss_spikes = [Spike.model_validate(row) for row in spikes(session, run_id)]
    metrics = chosen.names(session, run_id)
    drawn = windows_of(session, [run], first, last, points, metrics=metrics.names)[run_id]
    return SeriesPage(
        **dict(drawn),
        cursor=cursor,
        resumptions=resumptions,
        spikes=loss_spikes,
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
    """Read series of runs. names: only these, and always elapsed_ms for the time axis.

    metrics: names of the metrics, by default also `names`.
    """
    ids = [run.id for run in some_runs]
    by_run = windows.windows_of(session, ids, first=first, last=last, most=points, names=names)
    measured = windows.metrics_of_runs(
        session,
        ids,
        first=first if first > 1 else None,  # metrics may begin before the first step
        last=last,
        most=points,
        names=names if metrics is None else metrics,
    )
    before = _skips_before(session, ids, first)
    names_shown = set(SERIES) if names is None else {*names, "elapsed_ms"}
    return {
        run.id: _window(run, by_run[run.id], measured[run.id], before[run.id], names_shown)
        if run.id in by_run
        else _window(run, _no_steps(first, measured[run.id]), measured[run.id], 0, names_shown)
        for run in some_runs
    }


def _window(
    run: Run,
    window: windows.Window,
    measured: dict[str, windows.Line],
    skips_before: int,
    names_shown: set[str],
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
        series=_lines({name: line for name, line in lines.items() if name in names_shown}, loss),
        metrics=_lines(measured),
        skips=_ticks(window.skips, before=skips_before),
        nonfinite=_ticks(loss.nonfinite),
        damaged=[list(span) for span in window.damaged],
    )


def _no_steps(first: int, measured: dict[str, windows.Line]) -> windows.Window:
    """Return the window of a run that only logs metrics, over the steps of these."""
    last = max([first, *(line.x[-1] for line in measured.values() if line.x)])
    empty = windows.Line([], [], windows.Ticks())
    return windows.Window(
        *(first, last),
        total=0,
        points=0,
        bucket=1,
        series=dict.fromkeys(SERIES, empty),
        elapsed_ms=empty,
        skips=windows.Ticks(),
    )


def _lines(lines: dict[str, windows.Line], first: windows.Line | None = None) -> dict[str, Line]:
    """Return lines for a response, without the steps that are equal to those of a first line."""
    # Without validation, which would take longer than the query.
    return {
        name: Line.model_construct(
            x=None if first and line.x == first.x else line.x,
            y=line.y,
            mean_x=None if first and line.mean_x == first.mean_x else line.mean_x,
            mean_y=line.mean_y,
            nonfinite=_ticks(line.nonfinite) if line.is_bucketed and line.nonfinite.total else None,
        )
        for name, line in lines.items()
    }


def _ticks(ticks: windows.Ticks, before: int = 0) -> Ticks:
    return Ticks(steps=ticks.steps, counts=ticks.counts, total=ticks.total, before=before)


def _skips_before(session: Session, ids: list[int], step: int) -> dict[int, int]:
    """Count the skipped steps before a step, to derive the number of applied updates."""
    if step == 1:
        return dict.fromkeys(ids, 0)
    by_run = windows.windows_of(session, ids, last=step - 1, most=LEAST_POINTS, names=())
    return {run_id: by_run[run_id].skips.total if run_id in by_run else 0 for run_id in ids}


@router.get("/flagged", Permission.VIEW_RUN)
def get_flagged_steps(
    run_id: RunId,
    session: Db,
    after: Annotated[Step | None, Query(description="Only steps after this one")] = None,
    limit: Limit = 5000,
) -> FlaggedSteps:
    """Return the steps that were skipped or had a non-finite loss, never sampled."""
    runs.get(session, run_id)
    columns = history.read_flagged_steps(session, run_id, after=after or 0, limit=limit)
    return FlaggedSteps(
        **columns,
        total=history.count_flagged(session, run_id),
        next=columns["step"][-1] if len(columns["step"]) == limit else None,
    )


@router.get("/events", Permission.VIEW_RUN)
def get_events(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> Events:
    """Return the scaler events, with the parameters that overflowed."""
    runs.get(session, run_id)
    page = history.events(session, run_id, after=after, limit=limit)
    events = [Event.model_validate(row) for (row,) in page.rows]
    return Events(events=events, total=page.total, next=page.next)


class MetricSummary(BaseModel):
    """Summary of a metric: latest value and its step, finite extremes, number of points."""

    name: str
    step: int
    value: float | str | None
    low: float | None
    high: float | None
    points: int


class MetricSummaries(ListPage):
    """Metrics, in order of name."""

    metrics: list[MetricSummary]


@router.get("/metrics/summary", Permission.VIEW_RUN)
def get_metrics_summary(run_id: RunId, session: Db, chosen: Chosen) -> MetricSummaries:
    """Return summaries of a page of the run's metrics; `next` is the next `metric_after`."""
    runs.get(session, run_id)
    page = chosen.names(session, run_id)
    rows = windows.measure(session, run_id, names=page.names)
    metrics = [MetricSummary(**vars(row) | {"value": json_safe(row.value)}) for row in rows]
    return MetricSummaries(metrics=metrics, total=page.total, next=page.next)


@router.get("/metrics/names", Permission.VIEW_RUN)
def get_metric_names(
    run_id: RunId, session: Db, after: Name = "", limit: Limit = MOST_NAMES
) -> MetricNames:
    """Return the names of the run's metrics."""
    runs.get(session, run_id)
    return page_of_metric_names(session, [run_id], after, limit)


def page_of_metric_names(
    session: Session,
    run_ids: Collection[int],
    after: str,
    limit: int,
    *,
    search: str = "",
    without: Collection[str] = (),
) -> MetricNames:
    """Read a page of the names of the metrics of runs; search, without: as of `page_of_names`."""
    page = latest_metrics.page_of_names(
        session, run_ids, search=search, after=after, without=without, limit=limit
    )
    return MetricNames(names=page.names, total=page.total, next=page.next)


@router.get("/metrics/series", Permission.VIEW_RUN, response_model=MetricSeries)
def get_metric_series(
    run_id: RunId,
    session: Db,
    metric: NamedMetrics,
    first: Step = 1,
    last: Step | None = None,
) -> Response:
    """Return the series of some metrics from step first to step last."""
    return serialize(series_of_metrics(session, run_id, metric, first, last))


def series_of_metrics(
    session: Session, run_id: int, names: Collection[str], first: int, last: int | None
) -> MetricSeries:
    """Read the data for panels of metrics."""
    run = runs.get(session, run_id)
    cursor = str(history.cursor_now(session, run))
    measured = windows.metrics_of_runs(
        session,
        [run_id],
        first=first if first > 1 else None,  # metrics may begin before the first step
        last=last,
        most=MOST_POINTS,
        names=names,
    )
    return MetricSeries(metrics=_lines(measured[run_id]), cursor=cursor)


@router.get("/metrics", Permission.VIEW_RUN)
def get_metrics(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> Metrics:
    """Return metric points in order of name and step."""
    runs.get(session, run_id)
    page = series.metrics(session, run_id, after=after, limit=limit)
    metrics = [MetricPoint.model_validate(row) for row in page.rows]
    return Metrics(metrics=metrics, total=page.total, next=page.next)


@router.get("/log", Permission.VIEW_RUN)
def get_log(
    run_id: RunId,
    session: Db,
    before: Annotated[Step | None, Query(description="Only lines before this number")] = None,
    limit: Limit = 1000,
) -> Log:
    """Return the latest log lines."""
    runs.get(session, run_id)
    lines = series.log_lines(session, run_id, before=before, most=limit)
    return Log(
        log=[LogLine.model_validate(row) for row in lines],
        total=series.count_log_lines(session, run_id),
        next=lines[0].number if len(lines) == limit else None,
    )


@router.get("/checkpoints", Permission.VIEW_RUN)
def get_checkpoints(
    run_id: RunId, session: Db, after: After = "", limit: Limit = 1000
) -> Checkpoints:
    """Return the checkpoint files of the run."""
    runs.get(session, run_id)
    page = checkpoints.page_of_run(session, run_id, after=after, limit=limit)
    files = [CheckpointFileRow.model_validate(row) for (row,) in page.rows]
    return Checkpoints(checkpoints=files, total=page.total, next=page.next)
