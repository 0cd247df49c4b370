"""Form of a new command."""

from typing import Annotated

from fastapi import Query
from fastapi.responses import HTMLResponse, Response
from pydantic import ValidationError

from app.auth.permissions import RUN_COMMANDS
from app.auth.routing import Router
from app.dependencies import Posted
from app.html.rendering import Context
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

router = Router()


@router.get("/runs/new/command", RUN_COMMANDS)
def new_command(
    context: Context, source: Annotated[RunId | None, Query(alias="from")] = None
) -> HTMLResponse:
    """Show the form, empty or with the values of another command."""
    if source is None:
        return _form(context, CommandForm(), {})
    run = runs.get(context.session, source)
    if run.command is None:
        raise Conflict(f"Run {run.id} is not a command.")
    values = {"name": run.name, "tags": run.tags, "priority": str(run.priority)}
    values["project"] = run.project
    values["devices_per_node"] = str(run.devices_per_node)
    form = command_form.form_of(run.command, run.config)
    return _form(context, form, values)


@router.post("/runs/new/command", RUN_COMMANDS)
def submit_command(context: Context, posted: Posted) -> Response:
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
            raise Invalid(errors | wrong | check(context.session, submission).errors)
        run = submit(context.session, context.user, submission)
    except ValidationError as error:
        errors |= of_pydantic(error.errors())
    except Invalid as error:
        errors = error.errors
    else:
        return context.redirect(f"/runs/{run.id}")
    errors = bound(errors)
    form = command_form.read_form(posted, errors)
    return _form(context, form, values, errors)


def _form(
    context: Context, form: CommandForm, values: JsonObject, errors: dict[str, str] | None = None
) -> HTMLResponse:
    defaults = {"priority": "0", "devices_per_node": "1"}
    return context.render(
        "submission/new_command.html",
        form=form,
        parameter_kinds=KINDS,
        known_secrets=secrets.names(context.session),
        offered=workers.recipes(context.session),
        offers_commands=workers.offer_commands(context.session),
        projects=may_submit_to(context.session, context.principal.grants),
        values=dict.fromkeys(RUN_FIELDS, "") | defaults | values,
        errors=errors,
    )
