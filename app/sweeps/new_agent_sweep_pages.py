"""Form of a sweep for agents: settings of any script, one per line."""

import json
from collections.abc import Mapping

from fastapi.responses import HTMLResponse, RedirectResponse

from app.auth.permissions import ANY_SUBMITTER
from app.auth.routing import Router
from app.dependencies import Posted
from app.html.rendering import Context
from app.submission import forms
from app.submission.config_schema import Property
from app.sweeps import search_space, sweep_submission
from app.sweeps.new_sweep_pages import FIELDS, begin_confirmed, plan, read_plan, render_form
from app.sweeps.sweep_submission import Checked, SpaceGiven, SweepSubmission
from db.errors import Invalid
from halfstep.telemetry.plain_json import JsonObject

router = Router()

MOST_CHARACTERS = 10_000


@router.get("/sweeps/new/agents", ANY_SUBMITTER)
def new_sweep(context: Context) -> HTMLResponse:
    """Show the empty form."""
    return _form(context, "", FIELDS)


@router.post("/sweeps/agents", ANY_SUBMITTER, response_model=None)
def begin(context: Context, posted: Posted) -> HTMLResponse | RedirectResponse:
    """Begin the sweep if its preview is confirmed; otherwise show that or the errors."""
    values = read_plan(posted)
    text = str(posted.get("settings", ""))[:MOST_CHARACTERS]
    try:
        config, space = _read(text)
        submission = SweepSubmission(agents=True, config=config, space=space, **plan(values))
        checked = sweep_submission.check(context.session, context.user, submission)
        if checked.errors:
            raise Invalid(_by_field(checked.errors))
    except Invalid as error:
        return _form(context, text, values, error.errors)
    begun = begin_confirmed(context, posted, submission, checked, ", for agents")
    return begun or _form(context, text, values, checked=checked)


def _read(text: str) -> tuple[JsonObject, SpaceGiven]:
    """Return the common configuration and the search space. Raises Invalid."""
    config: JsonObject = {}
    space: SpaceGiven = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not (equals and name and value):
            raise Invalid({"settings": f"{line:.100} is not valid; allowed: name = values"})
        if name in config or name in space:
            raise Invalid({"settings": f"{name:.100} has two lines; allowed: one"})
        if value[0] in "[{\"'":  # one value, although it may contain commas
            config[name] = _parse_json(name, value)
            continue
        field = Property(name, "", search_space.guess(value))
        if search_space.is_search(field, value):
            space[name] = value
            continue
        is_boolean = field.rules.get("type") == "boolean"
        config[name] = forms.parse(field, value.lower() if is_boolean else value)
    return config, space


def _parse_json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        allowed = 'values without brackets and quotes, or one in JSON: [0.9, 0.999], "a, b"'
        wrong = f"{name:.100} = {text:.50} is not valid; allowed: {allowed}"
        raise Invalid({"settings": wrong}) from error


def _by_field(errors: Mapping[str, str]) -> dict[str, str]:
    """Return errors by field of the form; searched settings have one field for all."""
    ours = {path: text for path, text in errors.items() if path in FIELDS}
    others = [
        text if path == "space" else f"{path.removeprefix('config.')}: {text}"
        for path, text in errors.items()
        if path not in FIELDS
    ]
    return ours | ({"settings": "; ".join(others)} if others else {})


def _form(
    context: Context,
    text: str,
    values: Mapping[str, str],
    errors: dict[str, str] | None = None,
    checked: Checked | None = None,
) -> HTMLResponse:
    own = {"settings": text, "most_characters": MOST_CHARACTERS}
    return render_form(context, "sweeps/new_agent_sweep.html", values, errors, checked, **own)
