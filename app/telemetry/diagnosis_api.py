"""What was found out about single steps of a run, and the files that its recipe left."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import requires
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId
from app.runs.summary import Number
from app.telemetry.suggested_actions import AdvisedFinding, advised
from db.access.permissions import Permission
from db.files import artifacts
from db.paging import page_of_list
from db.runs import runs
from db.telemetry import histograms

router = APIRouter(prefix="/runs/{run_id}", tags=["diagnosis"])

MOST_SAMPLES = 300


class Sample(BaseModel):
    """How many gradients lay at each power of two, unscaled, in one step."""

    step: int
    scale: float
    lowest_exponent: Annotated[int, Field(description="Of the first count; the rest go upwards")]
    counts: list[int]
    zeros: int
    nonfinite: int


class Histograms(BaseModel):
    """Samples in order of step, and the modules that there are."""

    modules: list[str]
    samples: list[Sample]


class LayerNorms(BaseModel):
    """How large each layer's gradients were: L2, unscaled, before the clip."""

    steps: list[int]
    layers: Annotated[list[str], Field(description="In forward order")]
    norms: Annotated[list[list[Number]], Field(description="A list a layer, a number a step")]


class HeadroomLooks(BaseModel):
    """How many powers of two each module's largest numbers were below fp16's largest, 65,504."""

    steps: list[int]
    modules: Annotated[list[str], Field(description="In forward order")]
    left: Annotated[
        list[list[Number]],
        Field(description='A list a module, a number a step; "-Infinity" for inf or NaN'),
    ]


class ArtifactFile(BaseModel):
    """A file to download from /runs/{run_id}/artifacts/{id}/download."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    step: int
    name: str
    size_bytes: int
    sha256: str
    path: str | None
    is_stored: bool


class Replays(ListPage):
    """What replays found, in order of step."""

    replays: list[dict[str, Any]]


class Artifacts(ListPage):
    """Files, newest step first."""

    artifacts: list[ArtifactFile]


class Findings(ListPage):
    """What is wrong with a run, the gravest first."""

    findings: list[AdvisedFinding]


@router.get("/findings")
@requires(Permission.VIEW_RUN)
def get_findings(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Findings:
    """Return what is wrong with a run, the gravest first, and what can be done about it now."""
    found = page_of_list(advised(session, runs.get(session, run_id)), after=after, limit=limit)
    return Findings(findings=list(found.rows), total=found.total, next=found.next)


@router.get("/histograms")
@requires(Permission.VIEW_RUN)
def get_histograms(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    module: Annotated[str | None, Query(description="Without it: all modules together")] = None,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> Histograms:
    """Return histograms of the gradients' exponents, evenly thinned where they are many."""
    runs.get(session, run_id)
    newest = histograms.newest(session, run_id)
    names = [each["name"] for each in newest.content["modules"]] if newest else []
    samples = histograms.of_module(session, run_id, module, most=most)
    return Histograms(modules=names, samples=[Sample(**each) for each in samples])


@router.get("/layer-norms")
@requires(Permission.VIEW_RUN)
def get_layer_norms(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> LayerNorms:
    """Return the gradient norm of each layer over time, evenly thinned where there are many."""
    runs.get(session, run_id)
    return LayerNorms(**histograms.layer_norms(session, run_id, most=most))


@router.get("/headroom")
@requires(Permission.VIEW_RUN)
def get_headroom(
    run_id: RunId,
    session: Db,
    _principal: SignedIn,
    most: Annotated[int, Query(ge=2, le=2000)] = MOST_SAMPLES,
) -> HeadroomLooks:
    """Return the headroom of each module over time, evenly thinned where there are many looks."""
    runs.get(session, run_id)
    return HeadroomLooks(**histograms.headroom_by_step(session, run_id, most=most))


@router.get("/replays")
@requires(Permission.VIEW_RUN)
def get_replays(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Replays:
    """Return what replays of skipped steps found."""
    runs.get(session, run_id)
    found = artifacts.replays(session, run_id, after=after, limit=limit)
    replays = [row.content for (row,) in found.rows]
    return Replays(replays=replays, total=found.total, next=found.next)


@router.get("/artifacts")
@requires(Permission.VIEW_RUN)
def get_artifacts(
    run_id: RunId, session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Artifacts:
    """Return the files that the recipe left."""
    runs.get(session, run_id)
    found = artifacts.page_of_run(session, run_id, after=after, limit=limit)
    files = [ArtifactFile.model_validate(row) for (row,) in found.rows]
    return Artifacts(artifacts=files, total=found.total, next=found.next)
