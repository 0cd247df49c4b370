"""Form actions of the list and the run page; each redirects back to its page."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Form
from fastapi.responses import RedirectResponse
from pydantic import BeforeValidator
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn, local_path
from app.auth.permissions import SIGNED_IN, check, requires
from app.auth.project_parameters import form_project
from app.auth.routing import Router
from app.dependencies import Db, Posted
from app.http.parameters import RunId, as_run_id
from app.runs import continue_run
from app.submission.submission import PriorityNumber
from db.access import projects
from db.access.permissions import Permission
from db.queue import run_control
from db.runs import runs
from db.tables import User
from halfstep.number_formats import power_of_two

router = Router()


@router.post("/runs/cancellation", SIGNED_IN)
def cancel_runs(session: Db, posted: Posted, principal: SignedIn) -> RedirectResponse:
    """Cancel the selected active runs."""
    cancelled, ended = [], 0
    # In order of id, as all code locks runs: other orders could deadlock.
    for run_id in sorted({as_run_id("run", str(text)) for text in posted.getlist("run")}):
        check(session, Permission.CONTROL_RUN, run_id)
        if runs.get(session, run_id, lock=True).ended_at is None:
            run_control.cancel(session, run_id, principal.user)
            cancelled.append(run_id)
        else:
            ended += 1
    audit.set_runs(session, cancelled)
    return _back_to_list(posted, ended=ended)


@router.post("/runs/{run_id}/place", Permission.PRIORITIZE_RUN)
def move_to_front(
    run_id: RunId, session: Db, posted: Posted, principal: SignedIn
) -> RedirectResponse:
    """Move a queued run to the front."""
    run_control.move_to_front(session, run_id, principal.user)
    return _back_to_list(posted)


@router.post("/runs/{run_id}/priority", Permission.PRIORITIZE_RUN)
@audited("priority")
def set_priority(
    run_id: RunId,
    session: Db,
    posted: Posted,
    principal: SignedIn,
    priority: Annotated[PriorityNumber, Form()],
) -> RedirectResponse:
    """Change the priority of a queued run."""
    run_control.set_priority(session, run_id, priority, principal.user)
    return _back_to_list(posted)


@router.post("/runs/{run_id}/project", Permission.MOVE_RUN)
@audited("project")
def move_to_project(
    run_id: RunId,
    session: Db,
    principal: SignedIn,
    project: Annotated[str, form_project(Permission.MOVE_RUN, default=projects.DEFAULT)],
) -> RedirectResponse:
    """Move a run to another project."""
    projects.move(session, run_id, principal.user, project)
    return _back(run_id)


@router.post("/runs/{run_id}/continuation", Permission.SUBMIT_RUN)
def continue_from_checkpoint(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Queue the remaining steps of a cancelled or failed run, and show the new run."""
    return _back(continue_run.continue_run(session, principal.user, run_id).id)


@router.post("/runs/{run_id}/scale", Permission.CONTROL_RUN)
@audited("scale")
def set_scale(
    run_id: RunId,
    session: Db,
    principal: SignedIn,
    scale: Annotated[float, BeforeValidator(lambda text: power_of_two(text) or text), Form()],
) -> RedirectResponse:
    """Request another loss scale."""
    run_control.request_scale(session, run_id, principal.user, scale)
    return _back(run_id)


@router.post("/runs/{run_id}/replays", Permission.CONTROL_RUN)
@audited("step")
def replay(
    run_id: RunId, session: Db, principal: SignedIn, step: Annotated[int, Form()]
) -> RedirectResponse:
    """Request the replay of a step."""
    run_control.request_replay(session, run_id, principal.user, step)
    return _back(run_id)


@router.post("/runs/{run_id}/precision-diffs", Permission.CONTROL_RUN)
def precision_diff(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
    """Request a precision diff of the next step."""
    run_control.request_precision_diff(session, run_id, principal.user)
    return _back(run_id)


def _back_to_list(posted: FormData, *, ended: int = 0) -> RedirectResponse:
    """Redirect to the list with its filter.

    ended: number of runs that were not changed, for the list to show.
    """
    address = local_path(str(posted.get("back", "/runs")))
    if ended:
        address += f"{'&' if '?' in address else '?'}ended={ended}"
    return RedirectResponse(address, status_code=303)


def _back(run_id: int) -> RedirectResponse:
    return RedirectResponse(f"/runs/{run_id}", status_code=303)


def _control_route(act: Callable[[Session, int, User], object]) -> Callable[..., RedirectResponse]:
    @requires(Permission.CONTROL_RUN)
    def control(run_id: RunId, session: Db, principal: SignedIn) -> RedirectResponse:
        act(session, run_id, principal.user)
        return _back(run_id)

    return control


#: Control requests without a parameter; app.runs.runs_api describes each.
CONTROLS: dict[str, Callable[[Session, int, User], object]] = {
    "cancellation": run_control.cancel,
    "kill": run_control.kill,
    "pause": run_control.pause,
    "resumption": run_control.resume,
    "checkpoints": run_control.request_checkpoint,
}
for word, act in CONTROLS.items():
    router.add_api_route(f"/runs/{{run_id}}/{word}", _control_route(act), methods=["POST"])
