"""Pages of sweeps: the list, and one sweep with its controls."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.auth.project_parameters import form_project
from app.auth.routing import Router
from app.compare.comparison import MOST_RUNS
from app.compare.parity import is_seed
from app.dependencies import Db, Posted
from app.html.rendering import Context
from app.http.parameters import RowId
from app.projects.project_transfer import elsewhere
from app.sweeps import (
    new_agent_sweep_pages,
    new_command_sweep_pages,
    new_sweep_pages,
    sweep_metric,
    sweep_submission,
)
from app.sweeps import sweeps_api as api
from app.sweeps.search_space import GRID
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import quotas
from db.sweeps import sweeps
from db.tables import Sweep, User
from halfstep.suggestions import closest

router = Router()
for module in (new_sweep_pages, new_command_sweep_pages, new_agent_sweep_pages):
    router.include_router(module.router)  # first: /sweeps/new must not match /sweeps/{sweep_id}

PAGE_SIZE = 50
#: Number of best runs that are compared by a click.
COMPARED = 10


@router.get("/sweeps", SIGNED_IN)
def list_sweeps(context: Context, before: RowId | None = None) -> HTMLResponse:
    """Show the sweeps, newest first."""
    rows = sweeps.newest(context.session, before=before, limit=PAGE_SIZE)
    return context.render(
        "sweeps/sweeps.html",
        rows=[api.summary(*row) for row in rows],
        older=rows[-1][0].id if len(rows) == PAGE_SIZE else None,
        before=before,
    )


@router.get("/sweeps/{sweep_id}", Permission.VIEW_RUN)
def show_sweep(
    sweep_id: RowId, context: Context, sort: Literal["number", "value"] = "value", after: int = 0
) -> HTMLResponse:
    """Show a sweep; the browser fetches the page again after a change."""
    return _page(context, sweep_id, sort=sort, after=max(min(after, 10**6), 0))


def _page(
    context: Context,
    sweep_id: int,
    *,
    sort: str = "value",
    after: int = 0,
    more: str = "",
    problem: str = "",
) -> HTMLResponse:
    session = context.session
    sweep = sweeps.get(session, sweep_id)
    is_best_first = sort == "value"
    rows = sweeps.trials(session, sweep, best_first=is_best_first, after=after, limit=PAGE_SIZE)
    best = sweeps.trials(session, sweep, best_first=True, limit=COMPARED)
    shown = api.detail(session, sweep)
    pace = sweeps.pace(session, sweep_id)
    ended = shown.complete + shown.pruned + shown.failed
    return context.render(
        "sweeps/sweep.html",
        status_code=422 if problem else 200,
        cursor=sweeps.mark(session, sweep_id),
        destinations=elsewhere(session, context.principal, sweep.project),
        sweep=shown,
        pace=pace,
        seconds_left=pace.seconds_left(shown.runs_total - ended, shown.at_once),
        waits=_limits(session, sweep, needs_runs=shown.open < shown.at_once),
        config_changes=new_sweep_pages.list_changed(session, sweep),
        trials=[
            (trial, run)
            for trial, (_row, run) in zip(api.trials_of(session, sweep, rows), rows, strict=True)
        ],
        compared=[
            run.id
            for trial, run in best
            if trial.state == sweeps.COMPLETE and run.deleted_at is None
        ],
        paired=_list_paired(session, sweep),
        binned={run.id for _trial, run in (*rows, *best) if run.deleted_at is not None},
        sort=sort,
        after=after,
        older=after + PAGE_SIZE if len(rows) == PAGE_SIZE else None,
        newer=max(after - PAGE_SIZE, 0) if after else None,
        rank_by=closest(shown.metric, shown.metrics),
        goals=(sweeps.MINIMIZE, sweeps.MAXIMIZE),
        is_grid=sweep.kind == GRID,
        more=more,
        problem=problem,
    )


def _list_paired(session: Session, sweep: Sweep) -> list[int]:
    """Return all runs of a sweep over seeds and another setting, if they can be compared.

    Runs that failed are included: their pairs are unknown, not absent.
    """
    is_of_seeds = len(sweep.space) > 1 and any(map(is_seed, sweep.space))
    if not is_of_seeds or not 1 < sweep.submitted <= MOST_RUNS:
        return []
    return [trial.run_id for trial in sweeps.all_trials(session, sweep)]


def _limits(session: Session, sweep: Sweep, *, needs_runs: bool) -> list[str]:
    """Return the limits that prevent a sweep from submitting its next run."""
    if sweep.status != sweeps.RUNNING or sweep.submitted == sweep.runs_total or not needs_runs:
        return []
    owner = session.get_one(User, sweep.owner_id)
    return list(quotas.submission_obstacle(session, owner, sweep.project).values())


@router.post("/sweeps/{sweep_id}/extension", Permission.CONTROL_RUN, response_model=None)
def extend(sweep_id: RowId, context: Context, posted: Posted) -> HTMLResponse | RedirectResponse:
    """Add runs or values to a sweep, or show the errors."""
    setting, text = str(posted.get("setting", "")), str(posted.get("more", "")).strip()[:1000]
    try:
        with context.session.begin_nested():
            sweep_submission.extend(context.session, sweep_id, context.user, **_more(setting, text))
    except Invalid as error:
        return _page(context, sweep_id, more=text, problem="; ".join(error.errors.values()))
    return _back(sweep_id)


@router.post("/sweeps/{sweep_id}/metric", Permission.CONTROL_RUN, response_model=None)
@audited("metric")
def change_metric(
    sweep_id: RowId, context: Context, posted: Posted
) -> HTMLResponse | RedirectResponse:
    """Compare the runs by another metric, or show the errors."""
    sweep = sweep_submission.lock(context.session, sweep_id)
    try:
        sweep_metric.change(
            context.session, sweep, str(posted.get("metric", "")), str(posted.get("goal", ""))
        )
    except Invalid as error:
        problem = "; ".join(error.errors.values())
        return _page(context, sweep_id, problem=problem)
    return _back(sweep_id)


@router.post("/sweeps/{sweep_id}/project", Permission.MOVE_RUN)
@audited("project")
def move_to_project(
    sweep_id: RowId,
    session: Db,
    principal: SignedIn,
    project: Annotated[str, form_project(Permission.MOVE_RUN, default=projects.DEFAULT)],
) -> RedirectResponse:
    """Move a sweep with its runs to another project."""
    projects.move_sweep(session, sweep_id, principal.user, project)
    return _back(sweep_id)


def _more(setting: str, text: str) -> dict[str, Any]:
    if setting:
        return {"space": {setting: text}}
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise Invalid({"more": f"{text[:100]!r} is not valid; allowed: a whole number of runs"})
    return {"runs": int(text)}


def _back(sweep_id: int) -> RedirectResponse:
    return RedirectResponse(f"/sweeps/{sweep_id}", status_code=303)


def _control_route(act: Callable[[Session, int, User], object]) -> Callable[..., RedirectResponse]:
    @requires(Permission.CONTROL_RUN)
    def control(sweep_id: RowId, session: Db, principal: SignedIn) -> RedirectResponse:
        act(session, sweep_id, principal.user)
        return _back(sweep_id)

    return control


#: Controls without further parameters; app.sweeps.sweeps_api describes each.
CONTROLS: dict[str, Callable[[Session, int, User], object]] = {
    "cancellation": sweeps.cancel,
    "pause": lambda session, sweep_id, _user: sweeps.pause(session, sweep_id),
    "resumption": sweep_submission.resume,
    "retries": sweep_submission.retry,
}
for word, act in CONTROLS.items():
    router.add_api_route(f"/sweeps/{{sweep_id}}/{word}", _control_route(act), methods=["POST"])
