"""Any runs side by side, and groups: one configuration in several precisions."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.compare import comparison
from app.dependencies import Db, TheSettings
from app.http.parameters import RowId, RunId, Step, Text, as_run_ids
from app.http.responses import written
from app.runs.summary import Number, RunSummary
from app.telemetry.series_api import LEAST_POINTS, MOST_POINTS, SERIES, SeriesWindow, windows_of
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import comparisons, runs
from db.settings import Settings

router = APIRouter(tags=["comparisons"])

#: Series of one answer.
MOST_SERIES = 30

Runs = Annotated[
    str,
    Query(
        description=f"Run IDs, with commas between them, {comparison.MOST_RUNS} at most",
        examples=["1,3,8"],
    ),
]


class Figure(BaseModel):
    """A number; null is NaN or not measured yet. ratio: to the fp32 run's, or the first run's, of
    a group.
    """

    value: Number
    ratio: float | None


class ComparedRun(BaseModel):
    """One run. figures: run/step_ms, run/seconds, run/peak_memory_bytes, seconds, loss, and the
    last metrics. best: the lowest loss, and of metrics the lowest or the highest, where the run's
    best checkpoint or the metric's name says which is the better.
    """

    label: str
    run: RunSummary
    device: Annotated[str, Field(description="What it trained on; empty until it has")]
    figures: dict[str, Figure]
    best: dict[str, Figure]


class RunComparison(BaseModel):
    """Runs side by side, in the order asked for; differences: configuration fields with each run's
    value, in that order. missing: runs that there are not.
    """

    runs: list[ComparedRun]
    differences: Annotated[dict[str, list[Any]], Field(description="By path of the field")]
    missing: list[int]


class Comparison(RunComparison):
    """A group."""

    id: int
    left_out: Annotated[list[str], Field(description="Precisions that no worker offered")]


class Examples(BaseModel):
    """What steps are in examples. before: of a fork, those of its parents."""

    before: int
    each: int


class ComparedSeries(SeriesWindow):
    """Series of one run of several. examples: null where they are not known."""

    examples: Examples | None


class SeriesOfRuns(BaseModel):
    """By number of the run; those that there are not are missing."""

    runs: dict[int, ComparedSeries]


@router.post("/runs/{run_id}/comparison", status_code=201)
@requires(Permission.SUBMIT_RUN)
def compare(run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn) -> Comparison:
    """Queue a run's configuration and seed as fp32, fp16 without a scaler, fp16, and bf16.

    Precisions that no worker offers are left out, and named in the answer. Where all devices that
    may train it have TF32, fp32 comes a second time, with training.tf32; where some have fp8, so
    does that.
    """
    queued = comparison.queue(session, principal.user, runs.get(session, run_id))
    session.flush()
    return _group(session, queued[0].id, settings)


@router.get("/groups/{group_id}")
@requires(SIGNED_IN)
def get_group(
    group_id: RowId, session: Db, settings: TheSettings, _principal: SignedIn
) -> Comparison:
    """Look at a group."""
    return _group(session, group_id, settings)


@router.get("/comparison")
@requires(SIGNED_IN)
def get_comparison(
    runs: Runs, session: Db, settings: TheSettings, _principal: SignedIn
) -> RunComparison:
    """Lay runs side by side: how each went, and the settings in which they differ."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return RunComparison(**_told(comparison.of_runs(session, ids, settings)))


@router.get("/comparison/series", response_model=SeriesOfRuns)
@requires(SIGNED_IN)
def get_series_of_runs(
    runs: Runs,
    session: Db,
    _principal: SignedIn,
    series: Annotated[
        list[Text],
        Query(description=f"Any of {', '.join(SERIES)}, and names of metrics"),
    ] = ["loss"],  # noqa: B006 - as FastAPI wants it
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=LEAST_POINTS, le=MOST_POINTS)] = 1000,
) -> Response:
    """Return some series of several runs, from step first to step last."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return written(series_of(session, ids, series, first, last, points))


def series_of(
    session: Session, ids: list[int], names: list[str], first: int, last: int | None, points: int
) -> SeriesOfRuns:
    """Read what charts of runs side by side draw. Raises Invalid."""
    if len(names) > MOST_SERIES:
        text = f"it names {len(names):,} series; allowed: {MOST_SERIES} at most"
        raise Invalid({"series": text})
    found = {run.id: run for run in comparisons.drawn(session, ids)}
    counted = comparisons.examples(session, list(found.values()))
    drawn = windows_of(session, found.values(), first, last, points, names)
    series = {
        run_id: ComparedSeries(
            **dict(drawn[run_id]),
            examples=Examples.model_validate(counted[run_id], from_attributes=True)
            if run_id in counted
            else None,
        )
        for run_id in ids
        if run_id in found
    }
    return SeriesOfRuns(runs=series)


def _group(session: Session, group_id: int, settings: Settings) -> Comparison:
    laid_out = comparison.of_group(session, group_id, settings)
    return Comparison(id=group_id, left_out=laid_out.left_out, **_told(laid_out))


def _told(laid_out: comparison.Comparison) -> dict[str, Any]:
    return {
        "runs": [
            ComparedRun.model_validate(column, from_attributes=True) for column in laid_out.columns
        ],
        "differences": dict(laid_out.differences),
        "missing": laid_out.missing,
    }
