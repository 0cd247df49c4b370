"""Form of a sweep: a run's form with values, ranges or distributions in its fields."""

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from app.auth import audit
from app.auth.audit import unaudited
from app.auth.permissions import ANY_SUBMITTER
from app.auth.routing import Router
from app.dependencies import Posted
from app.html.rendering import Context
from app.http.parameters import Text
from app.submission import config_schema, forms
from app.submission.config_schema import Property, Schema
from app.submission.submission import check_commands, may_submit_to
from app.sweeps import pruning, search_space, sweep_submission
from app.sweeps.search_space import GRID, KINDS
from app.sweeps.sweep_submission import Checked, SweepSubmission
from db.errors import Invalid, NotFound
from db.queue import workers
from db.sweeps.sweeps import LOSS, MAXIMIZE, MINIMIZE
from db.tables import Sweep
from halfstep.telemetry.plain_json import JsonObject

router = Router()

KIND_TITLES = dict(zip(KINDS, ("Grid", "Random", "TPE", "CMA-ES", "QMC"), strict=True))
#: Fields of a sweep besides its recipe's settings, with their initial values.
FIELDS = {
    "kind": GRID,
    "pruner": "",
    "first": "",
    "runs": "",
    "at_once": "1",
    "metric": LOSS,
    "goal": "",
    "seed": "0",
    "name": "",
    "tags": "",
    "project": "",
    "priority": "0",
    "preemptible": "",
    "nodes": "1",
    "devices_per_node": "1",
}
PRUNER_TITLES = {"": "None", "hyperband": "Hyperband", "median": "Median", "patient": "Patient"}
WHOLE_NUMBERS = ("runs", "first", "at_once", "seed", "priority", "nodes", "devices_per_node")
TYPED = 1000
#: Fields of the form of a run that begin a sweep's.
TAKEN = ("tags", "project", "preemptible", "nodes", "devices_per_node")


@router.get("/sweeps/new", ANY_SUBMITTER)
def new_sweep(context: Context, recipe: Text = "") -> HTMLResponse:
    """Show the form with the recipe's defaults."""
    return _form(context, recipe, {}, FIELDS)


@router.post("/sweeps/new", ANY_SUBMITTER)
@unaudited("Shows a form: nothing is stored.")
def from_run(context: Context, posted: Posted) -> HTMLResponse:
    """Show the form with the values of a run's form."""
    recipe, taken = str(posted.get("recipe", "")), TAKEN
    values = {name: str(posted[name])[:TYPED] for name in taken if name in posted}
    try:
        schema = workers.recipe(context.session, recipe)["schema"]
    except NotFound:
        return _form(context, recipe, {}, FIELDS)
    typed = _read_fields(schema, posted)
    for field in config_schema.properties(schema):
        if field.rules.get("type") == "boolean" and not typed[field.path]:
            typed[field.path] = "false"  # an unchecked box sends nothing
    return _form(context, recipe, typed, FIELDS | values)


@router.post("/sweeps", ANY_SUBMITTER, response_model=None)
def begin(context: Context, posted: Posted) -> HTMLResponse | RedirectResponse:
    """Begin the sweep if its preview is confirmed; otherwise show that or the errors."""
    session = context.session
    recipe = str(posted.get("recipe", ""))
    values = read_plan(posted)
    typed: dict[str, str] = {}
    try:
        schema = workers.recipe(session, recipe)["schema"]
        typed = _read_fields(schema, posted)
        submission = _submission(recipe, schema, typed, values)
        checked = sweep_submission.check(session, context.user, submission)
        if checked.errors:
            raise Invalid(_explain(schema, submission, checked.errors))
    except NotFound as error:
        errors = {"recipe": str(error)}
        return _form(context, recipe, typed, values, errors)
    except Invalid as error:
        return _form(context, recipe, typed, values, error.errors)
    begun = begin_confirmed(context, posted, submission, checked, f", recipe {submission.recipe}")
    return begun or _form(context, recipe, typed, values, checked=checked)


def read_plan(posted: FormData) -> dict[str, str]:
    """Return the texts of the fields that every sweep has."""
    return {name: str(posted.get(name, usual)).strip()[:TYPED] for name, usual in FIELDS.items()}


def begin_confirmed(
    context: Context, posted: FormData, submission: SweepSubmission, checked: Checked, detail: str
) -> RedirectResponse | None:
    """Begin a sweep if its preview is confirmed. detail: for the audit log."""
    if str(posted.get("confirmed", "")) != checked.confirmation:
        audit.discard(context.request)
        return None
    session, key = context.session, str(posted.get("key", ""))[:64] or None
    sweep = sweep_submission.begin(session, context.user, submission, idempotency_key=key)
    audit.set_detail(session, f"sweep {sweep.id} of {checked.runs} runs{detail}")
    return context.redirect(f"/sweeps/{sweep.id}")


def render_form(
    context: Context,
    template: str,
    values: Mapping[str, str],
    errors: dict[str, str] | None,
    checked: Checked | None,
    **more: Any,
) -> HTMLResponse:
    """Show a form of a sweep. checked: its preview is to be confirmed.  more: its own."""
    return context.render(
        template,
        values=values,
        errors=errors,
        projects=may_submit_to(context.session, context.principal.grants),
        kinds=KIND_TITLES,
        pruners=PRUNER_TITLES,
        goals=(MINIMIZE, MAXIMIZE),
        runs=checked and checked.runs,
        warning=checked and checked.warning,
        confirmation=checked and checked.confirmation,
        key=secrets.token_hex(16),
        **more,
    )


def list_changed(session: Session, sweep: Sweep) -> list[tuple[str, Any]]:
    """Return the fixed settings of a sweep that differ from the recipe's defaults.

    For a command all fixed settings.
    """
    if sweep.command is not None or sweep.is_for_agents:
        return [(path, value) for path, value in sweep.config.items() if path not in sweep.space]
    try:
        schema = workers.recipe(session, sweep.recipe)["schema"]
    except NotFound:
        return []
    return [
        (field.path, value)
        for field in config_schema.properties(schema)
        if field.path not in sweep.space
        and (value := config_schema.get(sweep.config, field.path, field.default)) != field.default
    ]


def _read_fields(schema: Schema, posted: FormData) -> dict[str, str]:
    """Return the text of each field; checked boxes are separated by commas."""
    return {
        field.path: ", ".join(str(text).strip() for text in posted.getlist(field.path))[:10_000]
        for field in config_schema.properties(schema)
    }


def _submission(
    recipe: str, schema: Schema, typed: Mapping[str, str], values: Mapping[str, str]
) -> SweepSubmission:
    """Return the submission of the form. Raises Invalid for invalid numbers."""
    config: JsonObject = {}
    space: JsonObject = {}
    for field in config_schema.properties(schema):
        if search_space.is_search(field, typed[field.path]):
            space[field.path] = typed[field.path]
        else:
            config_schema.put(config, field.path, _value(field, typed[field.path]))
    return SweepSubmission(recipe=recipe, config=config, space=space, **plan(values))


def _explain(
    schema: Schema, submission: SweepSubmission, errors: Mapping[str, str]
) -> dict[str, str]:
    """Return errors for the form, where a wrong single value may have been meant as several."""
    fields = {
        field.path: field
        for field in config_schema.properties(schema)
        if field.path in errors and search_space.is_searchable(field)
    }
    return {
        path: search_space.with_notation(fields[path], text)
        if path in fields and path not in submission.space
        else text
        for path, text in errors.items()
        if path != "space" or not fields
    }


def plan(values: Mapping[str, str]) -> dict[str, object]:
    """Parse the fields that every sweep has. Raises Invalid for invalid numbers."""
    fields: dict[str, Any] = dict(values)
    errors = {}
    for name in WHOLE_NUMBERS:
        try:
            is_optional = name in ("runs", "first")
            fields[name] = int(values[name]) if values[name] or not is_optional else None
        except ValueError:
            text = f"{values[name][:100]} is not valid" if values[name] else "it is empty"
            errors[name] = f"{text}; allowed: a whole number"
    fields["preemptible"] = bool(values["preemptible"])
    pruner, first = fields.pop("pruner"), fields.pop("first", None)
    if pruner not in PRUNER_TITLES:
        errors["pruner"] = f"{pruner[:100]} is not valid; allowed: {', '.join(PRUNER_TITLES)}"
    if isinstance(first, int) and not 1 <= first <= pruning.MOST_RUNG:
        errors["first"] = f"{first} is not valid; allowed: 1 to {pruning.MOST_RUNG}"
    if errors:
        raise Invalid(errors)
    chosen = {"kind": pruner} | ({"first": first} if first else {})
    return fields | {"pruner": chosen if pruner else None}


def _value(field: Property, text: str) -> object:
    if field.rules.get("type") == "boolean" and not text:
        return text  # no box is checked, which the schema rejects
    return None if text == "off" and field.is_nullable else forms.parse(field, text)


def _form(
    context: Context,
    recipe: str,
    typed: Mapping[str, str],
    values: Mapping[str, str],
    errors: dict[str, str] | None = None,
    checked: Checked | None = None,
) -> HTMLResponse:
    offered = workers.recipes(context.session)
    chosen = workers.named(offered, recipe)
    problem = (errors or {}).get("recipe", "")
    if recipe and chosen is None:
        problem = f"No worker offers the recipe {recipe[:100]!r}. Choose one below."
    chosen = chosen or workers.usual_recipe(offered)
    schema = chosen["schema"] if chosen else {}
    fields = list(config_schema.properties(schema))
    texts = {field.path: forms.input_text(field.default) for field in fields} | dict(typed)
    precision = next((field for field in fields if field.path == "precision"), None)
    up = workers.alive(context.session)
    able = {name for worker in up for name in workers.precisions(worker.devices)}
    return render_form(
        context,
        "sweeps/new_sweep.html",
        values,
        errors,
        checked,
        form_address=f"/sweeps/new?{urlencode({'recipe': chosen['name']})}" if chosen else "",
        offered=offered,
        offers_commands=not check_commands(context.session, context.user)
        and workers.offer_commands(context.session),
        chosen=chosen,
        outdated=workers.describe_outdated_workers(context.session),
        problem=problem,
        field_sets=forms.field_sets(schema, {}, errors or {}),
        precision=precision,
        unable=set(precision.rules["enum"]) - able if precision and up else (),
        texts=texts,
        titles={field.path: field.title for field in fields},
        searched={f.path for f in fields if search_space.is_search(f, texts[f.path])},
        changed={f.path for f in fields if texts[f.path] != forms.input_text(f.default)},
        searchable={f.path for f in fields if search_space.is_searchable(f)},
    )
