"""Routes of comparisons: any runs, and groups of one configuration in several precisions."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.compare import comparison
from app.compare.equivalence import LARGEST
from app.compare.parity import Conclusion, ParityQuery, Value, parity_of
from app.compare.parity_sentences import sentence
from app.dependencies import Db, TheSettings
from app.http.list_pages import Limit
from app.http.parameters import Body, DocumentedModel, Name, RowId, RunId, Step, Text, as_run_ids
from app.http.responses import serialize
from app.runs.summary import Number, RunSummary
from app.telemetry.metric_names import NamedMetrics
from app.telemetry.series_api import (
    LEAST_POINTS,
    MOST_NAMES,
    MOST_POINTS,
    SERIES,
    MetricNames,
    SeriesWindow,
    page_of_metric_names,
    windows_of,
)
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import comparisons, runs
from db.settings import Settings

router = Router(tags=["comparisons"])

#: Limit of series in one response.
MOST_SERIES = 30

Runs = Annotated[
    str,
    Query(
        description=f"Comma-separated run ids, at most {comparison.MOST_RUNS}",
        examples=["1,3,8"],
    ),
]

Margin = Annotated[
    float | None,
    Query(
        gt=0,
        le=LARGEST,
        allow_inf_nan=False,
        description="Largest difference that counts as equal, in the unit of the compared values; "
        "without it equivalence is not tested",
        examples=[0.01],
    ),
]

ValueOfMetric = Annotated[
    Value,
    Query(
        description="What is compared: the last value; area, its mean over the steps that the "
        "curves of the pairs share; or time_to_target, the seconds until it first reaches `target`"
    ),
]

Target = Annotated[
    float | None,
    Query(
        ge=-LARGEST,
        le=LARGEST,
        allow_inf_nan=False,
        description="Value of the metric, for time_to_target",
        examples=[0.95],
    ),
]


class Figure(BaseModel):
    """A number; null is not measured yet."""

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


class RunComparison(DocumentedModel):
    """A comparison of runs, in the requested order."""

    runs: list[ComparedRun]
    differences: dict[str, list[Any]]
    """Settings that differ, by path, with the values in the order of runs"""
    missing: Annotated[list[int], Field(description="Ids of runs that do not exist")]


class Comparison(RunComparison):
    """A comparison of a group."""

    id: int
    left_out: Annotated[list[str], Field(description="Precisions that no worker offered")]


class Interval(BaseModel):
    """A confidence interval."""

    low: float
    high: float


class FurtherPairs(DocumentedModel):
    """Estimated number of further seeds; null: more than 1,000."""

    about: Annotated[
        int | None,
        Field(
            description="Seeds that decide with a probability of 80 %, if the true difference and "
            "the standard deviation are as measured"
        ),
    ]
    least: int | None
    """With the lower limit of the 80 % interval of the standard deviation"""
    most: Annotated[int | None, Field(description="With its upper limit")]


class PairedTest(DocumentedModel):
    """Differences of the pairs: value - reference_value.

    In seconds for time_to_target, else in the unit of the metric. Numbers are null if they are not
    known.
    """

    pairs: int
    reason: Annotated[str, Field(description="Why the conclusion is unknown; else empty")]
    difference: Annotated[float | None, Field(description="Mean of the differences")]
    deviation: Annotated[float | None, Field(description="Their standard deviation")]
    interval: Annotated[Interval | None, Field(description="95 % t-interval of the mean")]
    equivalence_interval: Interval | None
    """90 % t-interval: equivalent if it is within the margin"""
    further: FurtherPairs | None
    """If the conclusion is undecided, with a margin"""


class ParityPair(BaseModel):
    """Two runs with the same seed.

    Values are in seconds for time_to_target, else in the unit of the metric; null: NaN, none, or
    not read because the conclusion is unknown anyway.
    """

    seed: str
    run: int
    reference_run: int
    value: Number
    reference_value: Number


class CurveRange(DocumentedModel):
    """Steps over which the curves of all pairs are compared."""

    first: int
    last: int
    points: Annotated[int, Field(description="Steps of which each of these runs has a value")]
    buckets: int | None
    """Buckets of steps whose means are used, above 5,000 points; null: single points"""


class ParityGroup(DocumentedModel):
    """A group of runs compared with the reference."""

    name: str
    combination: dict[str, str]
    """In a grid: values of the further settings that its runs share"""
    conclusion: Conclusion
    """lower or higher if it is unknown which is better"""
    sentence: str
    also_differ: list[str]
    """What else differs between the runs of a pair"""
    range: Annotated[CurveRange | None, Field(description="For area, if it is known")]
    result: PairedTest
    pairs: list[ParityPair]


class Parity(DocumentedModel):
    """Groups of runs compared with one of them, paired by seed."""

    metric: str
    value: Value
    target: Annotated[float | None, Field(description="In the unit of the metric")]
    margin: float | None
    """In seconds for time_to_target, else as the metric"""
    is_low: bool | None
    """Lower values are better, as times are; null if unknown"""
    setting: Annotated[str, Field(description="Setting that the groups differ in")]
    seed: Annotated[str, Field(description="Setting that the runs of a pair share")]
    paired_by: list[str]
    """The seed, and in a grid the settings of the combinations"""
    settings: Annotated[list[str], Field(description="Settings that can be given as `group`")]
    reference: Annotated[str, Field(description="Group: fp32, or that of the first run")]
    groups: list[ParityGroup]
    reason: Annotated[str, Field(description="Why there are no groups; else empty")]
    unpaired: list[int]
    """Ids of runs in no pair; all, if there are no groups"""


class ComparedPrecisions(Body):
    """Request to queue a run in each precision."""

    seeds: Annotated[int, Field(ge=1, le=comparison.MOST_SEEDS)] = 1
    """Number of seeds, from the run's on: a group for each"""


class QueuedComparison(Comparison):
    """The comparison of the first seed's group."""

    queued: Annotated[list[int], Field(description="All queued runs, of all seeds")]


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


@router.post("/runs/{run_id}/comparison", Permission.SUBMIT_RUN, status_code=201)
def compare(
    run_id: RunId,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    body: ComparedPrecisions | None = None,
) -> QueuedComparison:
    """Queue a run in each precision: fp32, fp16 without a scaler, fp16, and bf16.

    Precisions that no worker offers are left out, and listed in the response. If all possible
    devices support TF32, fp32 is queued a second time with training.tf32; if some support fp8, fp8
    is queued too. With several seeds, the parity of the runs can be tested.
    """
    seeds = body.seeds if body else 1
    queued = comparison.queue(session, principal.user, runs.get(session, run_id), seeds)
    session.flush()
    group = _group(session, queued[0].id, settings)
    return QueuedComparison(**vars(group), queued=[run.id for run in queued])


@router.get("/groups/{group_id}", SIGNED_IN)
def get_group(group_id: RowId, session: Db, settings: TheSettings) -> Comparison:
    """Return the comparison of a group."""
    return _group(session, group_id, settings)


@router.get("/comparison", SIGNED_IN)
def get_comparison(
    runs: Runs,
    session: Db,
    settings: TheSettings,
    metric: NamedMetrics = [],  # noqa: B006 - FastAPI copies it
) -> RunComparison:
    """Compare runs: results of each, and the settings in which they differ.

    Of many metrics those that most of the runs have, and those that `metric` names.
    """
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return RunComparison(**_fields(comparison.of_runs(session, ids, settings, metric)))


@router.get("/comparison/metrics/names", SIGNED_IN)
def get_metric_names(
    runs: Runs,
    session: Db,
    search: Annotated[Text, Query(description="Words that the names contain")] = "",
    after: Name = "",
    limit: Limit = MOST_NAMES,
) -> MetricNames:
    """Return the names of the metrics of runs that can be drawn."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    return drawable_names(session, ids, search, after, limit)


def drawable_names(
    session: Session, ids: list[int], search: str, after: str, limit: int
) -> MetricNames:
    """Read a page of the names of the metrics of runs that can be drawn."""
    return page_of_metric_names(
        session, ids, after, limit, search=search, without=comparison.LABELS.keys()
    )


@router.get("/comparison/parity", SIGNED_IN)
def get_parity(
    runs: Runs,
    session: Db,
    settings: TheSettings,
    metric: Annotated[Name, Query(description="Default: the first metric, else the loss")] = "",
    margin: Margin = None,
    group: Annotated[
        Name, Query(description="Setting; default: the precision, else the only one that differs")
    ] = "",
    value: ValueOfMetric = "final",
    target: Target = None,
) -> Parity:
    """Compare groups of runs with a reference: equivalent, worse, better, undecided or unknown.

    The groups differ in their precision or in another setting. Runs are paired by their seed, in a
    grid within each combination of its further settings.
    """
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    query = ParityQuery(metric, margin, group, value, target)
    parity = parity_of(
        session, comparison.of_runs(session, ids, settings, [metric] if metric else []), query
    )
    groups = [
        {**vars(group_parity), "sentence": sentence(parity, group_parity)}
        for group_parity in parity.groups
    ]
    derived = {"is_low": parity.is_low, "paired_by": parity.paired_by, "groups": groups}
    return Parity.model_validate({**vars(parity), **derived}, from_attributes=True)


@router.get("/comparison/series", SIGNED_IN, response_model=SeriesOfRuns)
def get_series_of_runs(
    runs: Runs,
    session: Db,
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
    return serialize(series_of(session, ids, series, first, last, points))


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


def _fields(compared: comparison.Comparison) -> dict[str, object]:
    return {
        "runs": [
            ComparedRun.model_validate(column, from_attributes=True) for column in compared.columns
        ],
        "differences": dict(compared.differences),
        "missing": compared.missing,
    }
