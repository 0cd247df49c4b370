"""Routes of measurements of a run's checkpoints, and of precision plans."""

from typing import Annotated

from pydantic import BaseModel, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.routing import Router
from app.compare.comparison import MOST_SEEDS
from app.dependencies import Db, TheSettings
from app.http.parameters import Body, RunId
from app.runs.summary import RunSummary, summarise
from app.telemetry import precision_plans
from app.telemetry.precision_plans import Measurement, PlanOfRun
from db.access.permissions import Permission
from db.runs import runs

router = Router(prefix="/runs/{run_id}", tags=["diagnosis"])


class Seeds(Body):
    """Request to queue the best points of a plan."""

    seeds: Annotated[
        int, Field(ge=1, le=MOST_SEEDS, description="Number of seeds, from the run's on")
    ] = 3


class QueuedRuns(BaseModel):
    """Queued runs."""

    queued: Annotated[list[int], Field(description="Their ids, seed by seed")]


@router.post("/measurements", Permission.SUBMIT_RUN, status_code=201)
@audited("task", "checkpoints")
def queue_measurement(
    run_id: RunId, body: Measurement, session: Db, settings: TheSettings, principal: SignedIn
) -> RunSummary:
    """Measure a run's checkpoints: a precision plan, or precision diffs, as a run of its own.

    The run trains nothing. A worker measures in the run's sandbox; `precision-plan` and
    `precision-diffs` of that run return the result.
    """
    run = precision_plans.request(session, principal.user, runs.get(session, run_id), body)
    audit.set_runs(session, [run_id, run.id])
    return summarise(session, run, principal.user.name, settings)


@router.get("/precision-plan", Permission.VIEW_RUN)
def get_precision_plan(run_id: RunId, session: Db) -> PlanOfRun:
    """Return the precision plan that a run has measured: the fastest mixes within its bounds."""
    plan = precision_plans.of_run(session, runs.get(session, run_id))
    return PlanOfRun(plan=None if plan is None else precision_plans.as_json(plan))


@router.post("/precision-plan/runs", Permission.SUBMIT_RUN, status_code=201)
@audited("seeds")
def queue_best(
    run_id: RunId, session: Db, principal: SignedIn, body: Seeds | None = None
) -> QueuedRuns:
    """Queue the three best points of a run's precision plan, and fp32, with several seeds.

    Their parity with fp32 is that of `comparison/parity`.
    """
    seeds = body.seeds if body else Seeds().seeds
    run = runs.get(session, run_id)
    queued = precision_plans.queue_best(session, principal.user, run, seeds)
    audit.set_runs(session, [run.id for run in queued])
    return QueuedRuns(queued=[run.id for run in queued])
