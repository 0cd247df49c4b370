"""Routes of a run's diagnoses and artifacts."""

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field

from app.auth.routing import Router
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId
from app.live.json_rows import ArtifactFile
from app.runs.summary import Number
from app.telemetry import precision_diffs
from app.telemetry.precision_diffs import PrecisionDiffs
from app.telemetry.suggested_actions import AdvisedFinding, advise
from db.access.permissions import Permission
from db.files import artifacts
from db.paging import page_of_list
from db.runs import runs
from db.telemetry import histograms

router = Router(prefix="/runs/{run_id}", tags=["diagnosis"])

MOST_SAMPLES = 300


class Sample(BaseModel):
    """Numbers of unscaled gradients at each power of two in one step."""

    step: int
    scale: float
    lowest_exponent: Annotated[int, Field(description="Exponent of the first count; ascending")]
    counts: list[int]
    zeros: int
    nonfinite: int


class Histograms(BaseModel):
    """Samples in order of step, and the names of the modules."""

    modules: list[str]
    samples: list[Sample]


class LayerNorms(BaseModel):
    """Gradient norms by layer: L2, unscaled, before the clip."""

    steps: list[int]
    layers: Annotated[list[str], Field(description="In forward order")]
    norms: Annotated[list[list[Number]], Field(description="By layer and step")]


class HeadroomSeries(BaseModel):
    """Headroom by module: powers of two between its largest number and fp16's, 65,504."""

    steps: list[int]
    modules: Annotated[list[str], Field(description="In forward order")]
    left: Annotated[
        list[list[Number]],
        Field(description='By module and step; "-Infinity" for inf or NaN'),
    ]


class Replays(ListPage):
    """Replays in order of step."""

    replays: list[dict[str, Any]]


class Artifacts(ListPage):
    """Files, newest step first."""

    artifacts: list[ArtifactFile]


class Findings(ListPage):
    """Findings about a run, the most severe first."""

    findings: list[AdvisedFinding]


@router.get("/findings", Permission.VIEW_RUN)
def get_findings(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> Findings:
    """Return the findings about a run, the most severe first, with actions possible now."""
    page = page_of_list(advise(session, runs.get(session, run_id)), after=after, limit=limit)
    return Findings(findings=list(page.rows), total=page.total, next=page.next)


@router.get("/histograms", Permission.VIEW_RUN)
def get_histograms(
    run_id: RunId,
    session: Db,
    module: Annotated[str | None, Query(description="Default: the sum of all modules")] = None,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> Histograms:
    """Return histograms of the gradients' exponents, evenly thinned to at most `most`."""
    runs.get(session, run_id)
    newest = histograms.newest(session, run_id)
    names = [row["name"] for row in newest.content["modules"]] if newest else []
    samples = histograms.of_module(session, run_id, module, most=most)
    return Histograms(modules=names, samples=[Sample(**sample) for sample in samples])


@router.get("/layer-norms", Permission.VIEW_RUN)
def get_layer_norms(
    run_id: RunId,
    session: Db,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> LayerNorms:
    """Return the gradient norm of each layer over time, evenly thinned to at most `most`."""
    runs.get(session, run_id)
    return LayerNorms(**histograms.layer_norms(session, run_id, most=most))


@router.get("/headroom", Permission.VIEW_RUN)
def get_headroom(
    run_id: RunId,
    session: Db,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> HeadroomSeries:
    """Return the headroom of each module over time, evenly thinned to at most `most`."""
    runs.get(session, run_id)
    return HeadroomSeries(**histograms.headroom_by_step(session, run_id, most=most))


@router.get("/precision-diffs", Permission.VIEW_RUN)
def get_precision_diffs(
    run_id: RunId,
    session: Db,
    step: Annotated[
        int | None, Query(ge=0, description="Default: the step of the last diff")
    ] = None,
) -> PrecisionDiffs:
    """Return one batch in two precisions, module by module, and the steps that have such a diff."""
    return precision_diffs.of_run(session, runs.get(session, run_id), step)


@router.get("/replays", Permission.VIEW_RUN)
def get_replays(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> Replays:
    """Return the replays of skipped steps."""
    runs.get(session, run_id)
    page = artifacts.replays(session, run_id, after=after, limit=limit)
    replays = [row.content for (row,) in page.rows]
    return Replays(replays=replays, total=page.total, next=page.next)


@router.get("/artifacts", Permission.VIEW_RUN)
def get_artifacts(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> Artifacts:
    """Return the artifacts of the recipe."""
    runs.get(session, run_id)
    page = artifacts.page_of_run(session, run_id, after=after, limit=limit)
    files = [ArtifactFile.model_validate(row) for (row,) in page.rows]
    return Artifacts(artifacts=files, total=page.total, next=page.next)
