"""Form of a new command."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError
from sqlalchemy.orm import Session

from app.auth.authentication import Principal, SignedIn
from app.auth.permissions import RUN_COMMANDS, requires
from app.dependencies import Db, Posted
from app.html.rendering import page
from app.http.parameters import RunId
from app.submission import command_form
from app.submission.command_form import KINDS, CommandForm
from app.submission.new_run_pages import RUN_FIELDS, numbers
from app.submission.submission import Submission, check, may_submit_to, submit
from db.access import secrets
from db.errors import Conflict, Invalid
from db.queue import workers
from db.runs import runs
from halfstep.field_errors import bound, of_pydantic
from halfstep.telemetry.plain_json import JsonObject

router = APIRouter()


@router.get("/runs/new/command")
@requires(RUN_COMMANDS)
def new_command(
    request: Request,
    session: Db,
    principal: SignedIn,
    source: Annotated[RunId | None, Query(alias="from")] = None,
) -> HTMLResponse:
    """Show the form, empty or with the values of another command."""
    if source is None:
        return _form(request, session, principal, CommandForm(), {})
    run = runs.get(session, source)
    if run.command is None:
        raise Conflict(f"Run {run.id} is not a command.")
    values = {"name": run.name, "tags": run.tags, "priority": str(run.priority)}
    values["project"] = run.project
    values["devices_per_node"] = str(run.devices_per_node)
    form = command_form.form_of(run.command, run.config)
    return _form(request, session, principal, form, values)


@router.post("/runs/new/command")
@requires(RUN_COMMANDS)
def submit_command(request: Request, session: Db, posted: Posted, principal: SignedIn) -> Response:
    """Queue the command, or show the form with its errors."""
    values = {name: str(posted.get(name, "")).strip() for name in RUN_FIELDS}
    form = command_form.read_form(posted, {})
    command, config, errors = command_form.parse_submission(form)
    options, wrong = numbers(values, posted)
    try:
        submission = Submission.model_validate(
            {
                "command": command,
                "config": config,
                "name": values["name"],
                "tags": values["tags"],
                "project": values["project"],
                **options,
            }
        )
        if errors | wrong:
            raise Invalid(errors | wrong | check(session, submission).errors)
        run = submit(session, principal.user, submission)
    except ValidationError as error:
        errors |= of_pydantic(error.errors())
    except Invalid as error:
        errors = error.errors
    else:
        return RedirectResponse(f"/runs/{run.id}", status_code=303)
    errors = bound(errors)
    form = command_form.read_form(posted, errors)
    return _form(request, session, principal, form, values, errors)


def _form(
    request: Request,
    session: Session,
    principal: Principal,
    form: CommandForm,
    values: JsonObject,
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    defaults = {"priority": "0", "devices_per_node": "1"}
    return page(
        request,
        "submission/new_command.html",
        principal=principal,
        status_code=422 if errors else 200,
        form=form,
        parameter_kinds=KINDS,
        known_secrets=secrets.names(session),
        offered=workers.recipes(session),
        offers_commands=workers.offer_commands(session),
        projects=may_submit_to(session, principal.grants),
        values=dict.fromkeys(RUN_FIELDS, "") | defaults | values,
        errors=errors or {},
    )
