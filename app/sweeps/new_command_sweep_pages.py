"""Form of a command's sweep: a command's form with searches in its parameters."""

from collections.abc import Mapping

from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from app.auth.audit import unaudited
from app.auth.permissions import RUN_COMMANDS
from app.auth.routing import Router
from app.dependencies import Posted
from app.html.rendering import Context
from app.submission import command_form
from app.submission.command_form import CommandForm
from app.sweeps import sweep_submission
from app.sweeps.new_sweep_pages import FIELDS, TYPED, begin_confirmed, plan, read_plan, render_form
from app.sweeps.sweep_submission import Checked, SweepSubmission
from db.access import secrets
from db.errors import Invalid
from db.queue import workers
from halfstep.field_errors import bound, of_pydantic

router = Router()

TAKEN = ("tags", "project", "priority", "devices_per_node")


@router.get("/sweeps/new/command", RUN_COMMANDS)
def new_sweep(context: Context) -> HTMLResponse:
    """Show the empty form."""
    return _form(context, CommandForm(), FIELDS)


@router.post("/sweeps/new/command", RUN_COMMANDS)
@unaudited("Shows a form: nothing is stored.")
def from_run(context: Context, posted: Posted) -> HTMLResponse:
    """Show the form with the values of a run's form."""
    values = {name: str(posted[name])[:TYPED] for name in TAKEN if name in posted}
    form = command_form.read_form(posted, {})
    return _form(context, form, FIELDS | values)


@router.post("/sweeps/command", RUN_COMMANDS, response_model=None)
def begin(context: Context, posted: Posted) -> HTMLResponse | RedirectResponse:
    """Begin the sweep if its preview is confirmed; otherwise show that or the errors."""
    values = read_plan(posted)
    form = command_form.read_form(posted, {})
    command, config, space, errors = command_form.parse_search(form)
    try:
        fields = {"command": command, "config": config, "space": space, **plan(values)}
        submission = SweepSubmission.model_validate(fields)
        checked = sweep_submission.check(context.session, context.user, submission)
        errors |= checked.errors
    except ValidationError as error:
        errors |= of_pydantic(error.errors())
    except Invalid as error:
        errors |= error.errors
    if errors := bound(errors):
        form = command_form.read_form(posted, errors)
        return _form(context, form, values, errors)
    begun = begin_confirmed(context, posted, submission, checked, "")
    return begun or _form(context, form, values, checked=checked)


def _form(
    context: Context,
    form: CommandForm,
    values: Mapping[str, str],
    errors: dict[str, str] | None = None,
    checked: Checked | None = None,
) -> HTMLResponse:
    _command, _config, space, _errors = command_form.parse_search(form)
    return render_form(
        context,
        "sweeps/new_command_sweep.html",
        values,
        errors,
        checked,
        form=form,
        searched=space,
        parameter_kinds=command_form.KINDS,
        known_secrets=secrets.names(context.session),
        offered=workers.recipes(context.session),
        offers_commands=workers.offer_commands(context.session),
    )
