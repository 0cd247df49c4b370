"""Routes of comparisons: any runs, and groups of one configuration in several precisions."""

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

#: Limit of series in one response.
MOST_SERIES = 30

Runs = Annotated[
    str,
    Query(
        description=f"Comma-separated run ids, at most {comparison.MOST_RUNS}",
        examples=["1,3,8"],
    ),
]


class Figure(BaseModel):
    """A number; null is NaN or not measured yet."""

    value: Number
    ratio: Annotated[
        float | None, Field(description="In a group: to the fp32 run, or to the first run")
    ]


class ComparedRun(BaseModel):
    """One run of a comparison."""

    label: str
    run: RunSummary
    device: Annotated[str, Field(description="Device; empty until it has trained")]
    figures: Annotated[
        dict[str, Figure],
        Field(
            description="run/step_ms, run/seconds, run/peak_memory_bytes, seconds, loss, and the "
            "last value of each metric"
        ),
    ]
    best: Annotated[
        dict[str, Figure],
        Field(
            description="The lowest loss, and the best value of each metric whose direction is "
            "known from the policy for the best checkpoint or from its name"
        ),
    ]


class RunComparison(BaseModel):
    """A comparison of runs, in the requested order."""

    runs: list[ComparedRun]
    differences: Annotated[
        dict[str, list[Any]],
        Field(description="Settings that differ, by path, with the values in the order of runs"),
    ]
    missing: Annotated[list[int], Field(description="Ids of runs that do not exist")]


class Comparison(RunComparison):
    """A comparison of a group."""

    id: int
    left_out: Annotated[list[str], Field(description="Precisions that no worker offered")]


class Examples(BaseModel):
    """Conversion of steps to examples."""

    before: Annotated[int, Field(description="Examples of a fork's parents")]
    each: Annotated[int, Field(description="Examples per step")]


class ComparedSeries(SeriesWindow):
    """Series of one run of several."""

    examples: Annotated[Examples | None, Field(description="Null if unknown")]


class SeriesOfRuns(BaseModel):
    """Series of several runs."""

    runs: Annotated[
        dict[int, ComparedSeries], Field(description="By run id, without runs that do not exist")
    ]


@router.post("/runs/{run_id}/comparison", status_code=201)
@requires(Permission.SUBMIT_RUN)
def compare(run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn) -> Comparison:
    """Queue a run's configuration and seed as fp32, fp16 without a scaler, fp16, and bf16.

    Precisions that no worker offers are left out, and listed in the response. If all possible
    devices support TF32, fp32 is queued a second time with training.tf32; if some support fp8, fp8
    is queued too.
    """
    queued = comparison.queue(session, principal.user, runs.get(session, run_id))
    session.flush()
    return _group(session, queued[0].id, settings)


@router.get("/groups/{group_id}")
@requires(SIGNED_IN)
def get_group(
    group_id: RowId, session: Db, settings: TheSettings, _principal: SignedIn
) -> Comparison:
    """Return the comparison of a group."""
    return _group(session, group_id, settings)


@router.get("/comparison")
@requires(SIGNED_IN)
def get_comparison(
    runs: Runs, session: Db, settings: TheSettings, _principal: SignedIn
) -> RunComparison:
    """Compare runs: results of each, and the settings in which they differ."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return RunComparison(**_fields(comparison.of_runs(session, ids, settings)))


@router.get("/comparison/series", response_model=SeriesOfRuns)
@requires(SIGNED_IN)
def get_series_of_runs(
    runs: Runs,
    session: Db,
    _principal: SignedIn,
    series: Annotated[
        list[Text],
        Query(description=f"Any of {', '.join(SERIES)}, and names of metrics"),
    ] = ["loss"],  # noqa: B006 - FastAPI copies it
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=LEAST_POINTS, le=MOST_POINTS)] = 1000,
) -> Response:
    """Return series of several runs, from step first to step last."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return written(series_of(session, ids, series, first, last, points))


def series_of(
    session: Session, ids: list[int], names: list[str], first: int, last: int | None, points: int
) -> SeriesOfRuns:
    """Read the data for the charts of a comparison. Raises Invalid."""
    if len(names) > MOST_SERIES:
        text = f"{len(names):,} series are named; allowed: at most {MOST_SERIES}"
        raise Invalid({"series": text})
    rows = {run.id: run for run in comparisons.drawn(session, ids)}
    counted = comparisons.examples(session, list(rows.values()))
    drawn = windows_of(session, rows.values(), first, last, points, names)
    series = {
        run_id: ComparedSeries(
            **dict(drawn[run_id]),
            examples=Examples.model_validate(counted[run_id], from_attributes=True)
            if run_id in counted
            else None,
        )
        for run_id in ids
        if run_id in rows
    }
    return SeriesOfRuns(runs=series)


def _group(session: Session, group_id: int, settings: Settings) -> Comparison:
    compared = comparison.of_group(session, group_id, settings)
    return Comparison(id=group_id, left_out=compared.left_out, **_fields(compared))


def _fields(compared: comparison.Comparison) -> dict[str, Any]:
    return {
        "runs": [
            ComparedRun.model_validate(column, from_attributes=True) for column in compared.columns
        ],
        "differences": dict(compared.differences),
        "missing": compared.missing,
    }
