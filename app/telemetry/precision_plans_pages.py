"""Page of a precision plan, and forms that queue measurements and the best points of a plan."""

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Form
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BeforeValidator

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.routing import Router
from app.compare.comparison import MOST_SEEDS
from app.compare.comparison_api import Margin
from app.dependencies import Db
from app.html.rendering import Context
from app.http.parameters import Name, RunId, Step
from app.runs.summary import summarise
from app.telemetry import precision_plans
from app.telemetry.precision_plans import Measurement
from db.access.permissions import Permission
from db.runs import runs
from db.sweeps import sweeps
from db.tables import PRECISION_PLAN
from db.telemetry import series

router = Router()

MODULES_SHOWN = 10


@router.post("/runs/{run_id}/measurements", Permission.SUBMIT_RUN)
@audited("task", "checkpoints")
def queue_measurement(
    run_id: RunId,
    session: Db,
    principal: SignedIn,
    task: Annotated[Literal["precision_plan", "precision_diff"], Form()],
    checkpoints: Annotated[list[Step], Form(max_length=precision_plans.MOST_CHECKPOINTS)] = [],  # noqa: B006
    fresh_weights: Annotated[bool, Form()] = False,
    max_error: Annotated[float, Form(ge=0, le=10)] = 0.1,
    min_cosine: Annotated[float, Form(ge=-1, le=1)] = 0.99,
) -> RedirectResponse:
    """Measure a run's checkpoints: queue a precision plan, or precision diffs, and show it."""
    wanted = Measurement(
        task=task,
        checkpoints=checkpoints,
        fresh_weights=fresh_weights,
        max_error=max_error,
        min_cosine=min_cosine,
    )
    run = precision_plans.request(session, principal.user, runs.get(session, run_id), wanted)
    audit.set_runs(session, [run_id, run.id])
    part = "/precision-plan" if task == PRECISION_PLAN else "?tab=gradients"
    return RedirectResponse(f"/runs/{run.id}{part}", status_code=303)


@router.get("/runs/{run_id}/precision-plan", Permission.VIEW_RUN)
def show_plan(run_id: RunId, context: Context) -> HTMLResponse:
    """Show the precision plan that a run has measured."""
    run, owner = runs.get_with_owner(context.session, run_id)
    plan = precision_plans.of_run(context.session, run)
    may_queue = (
        run.task == PRECISION_PLAN and Permission.SUBMIT_RUN in context.principal.permissions(run)
    )
    known = sweeps.earlier_metrics(context.session, run.recipe, "") if may_queue else []
    logged = [name for name in known if name != sweeps.LOSS and not name.startswith("run/")]
    return context.render(
        "precision/plan.html",
        metrics=[(sweeps.LOSS, "Last loss"), *((name, name) for name in logged)],
        may_queue=may_queue,
        run=summarise(context.session, run, owner, context.settings),
        config=run.config,
        weights=precision_plans.describe_weights(run) if run.task == PRECISION_PLAN else "",
        plan=plan,
        log=[] if plan else series.log_lines(context.session, run_id, most=1),
        forms=[precision_plans.form(run, point) for point in plan.points] if plan else [],
        best_points=precision_plans.best_points(plan) if plan else [],
        modules_shown=MODULES_SHOWN,
        most_seeds=MOST_SEEDS,
    )


@router.post("/runs/{run_id}/precision-plan/runs", Permission.SUBMIT_RUN)
@audited("seeds")
def queue_best(
    run_id: RunId,
    session: Db,
    principal: SignedIn,
    seeds: Annotated[int, Form(ge=1, le=MOST_SEEDS)] = 3,
    metric: Annotated[Name, Form()] = "",
    margin: Annotated[Margin, Form(), BeforeValidator(lambda text: text or None)] = None,
) -> RedirectResponse:
    """Queue the best points of a plan, and fp32, with several seeds, and compare them."""
    run = runs.get(session, run_id)
    queued = precision_plans.queue_best(session, principal.user, run, seeds)
    audit.set_runs(session, [run.id for run in queued])
    query = {"runs": ",".join(str(run.id) for run in queued), "metric": metric}
    query |= {"margin": str(margin)} if margin else {}
    return RedirectResponse(f"/compare?{urlencode(query, safe=',')}#parity", status_code=303)
