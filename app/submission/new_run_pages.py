"""Form of a new run."""

import json
import re
from collections.abc import Container, Sequence
from copy import deepcopy
from typing import Annotated, Any

from fastapi import Depends, Query
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import unaudited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import ANY_SUBMITTER, check_project
from app.auth.routing import Router
from app.dependencies import Db, Posted, TheSettings
from app.files import weight_uploads
from app.html.rendering import Context
from app.http.parameters import RowId, RunId, Step, Text
from app.submission import config_schema, forms
from app.submission.submission import (
    LIMITS,
    Submission,
    check,
    check_commands,
    may_submit_to,
    name_of_fork,
    same_sizes,
    submit,
)
from app.telemetry import precision_plans
from db.access.permissions import Permission
from db.errors import Invalid, NotFound
from db.files import checkpoints
from db.files.uploads import SETTING
from db.queue import estimates, workers
from db.queue.estimates import Measured
from db.runs import presets, runs
from db.tables import PRECISION_PLAN, TRAIN, Run
from halfstep.telemetry.plain_json import JsonObject

router = Router()

#: Integer fields of every run, with their defaults.
WHOLE_NUMBERS = {
    "priority": 0,
    "nodes": 1,
    "devices_per_node": 1,
    "after_id": None,
    "parent_id": None,
    "parent_step": None,
    "compared_with": None,
}
#: Path of a setting, with at most one group.
PATH = re.compile(r"\w{1,100}(\.\w{1,100})?")
FP32 = "modules.fp32"
#: filled_from: the run from which the form was prefilled.  initial: its values then, by form.js.
RUN_FIELDS = ("name", "tags", "project", "preemptible", "filled_from", "initial", *WHOLE_NUMBERS)


@router.get("/runs/new", ANY_SUBMITTER)
def new_run(
    context: Context,
    recipe: Text = "",
    source: Annotated[RunId | None, Query(alias="from")] = None,
    step: Step | None = None,
    fp32: Text = "",
    before: Step | None = None,
    weights_step: Step | None = None,
    preset: RowId | None = None,
    changes: Annotated[list[Text], Query(alias="set", max_length=50)] = [],  # noqa: B006
) -> Response:
    """Show the form, with the defaults or prefilled from another run.

    step: start from this checkpoint of that run.  before: or from its last checkpoint before this
    step, if any.  fp32: a module to run in fp32, compared with that run.  weights_step: start from
    the weights of this step of that run.  changes: path=value in JSON, of changed settings.
    preset: prefill from this preset instead.
    """
    session = context.session
    if preset is not None:
        return _preset(context, preset)
    config: JsonObject = {}
    values = {"priority": "0", "nodes": "1", "devices_per_node": "1"}
    settings = dict(map(_change, changes))
    if source is not None:
        run = runs.get(session, source)
        if run.command is not None:
            return context.redirect(f"/runs/new/command?from={run.id}")
        runs.check_is_ours(run, "be cloned")
        recipe = recipe or run.recipe
        is_same = recipe == run.recipe or recipe == _name(session, run.recipe)
        like, config = run, deepcopy(run.config) if is_same else {}
        values |= {"name": run.name, "tags": run.tags, "priority": str(run.priority)}
        values["preemptible"] = "true" if run.preemptible else ""
        if is_same and run.task != TRAIN:
            if settings.get("lab.task") == TRAIN:
                like, config = precision_plans.find_planned(session, run)
                values["name"] = ""
            values |= _parent(like)
        values["project"] = run.project
        values |= {"nodes": str(like.nodes), "devices_per_node": str(like.devices_per_node)}
        values["filled_from"] = str(run.id) if is_same else ""
        if fp32:
            config_schema.put(config, FP32, [*config_schema.get(config, FP32, []), fp32])
            values["compared_with"] = str(run.id)
        if before is not None:
            step = checkpoints.newest_step(session, run.id, before=before)
        if weights_step is not None:
            config["weights"] = {"run": run.id, "step": weights_step}
        if step is not None:
            config.pop("weights", None)  # the checkpoint contains the weights
            values |= {"parent_id": str(run.id), "parent_step": str(step)}
            values["name"] = name_of_fork(run.name, step)
            if step >= run.steps_total:  # no step would be left
                config_schema.put(config, "training.steps", step + run.steps_total)
    for path, value in settings.items():
        config_schema.put(config, path, value)
    return form(context, recipe, config, values)


def _parent(run: Run) -> dict[str, str]:
    """Return the form's fields of the checkpoint that a run starts from or measures."""
    fields = {"parent_id": run.parent_id, "parent_step": run.parent_step}
    return {name: str(value) for name, value in fields.items() if value is not None}


def _preset(context: Context, preset_id: int) -> HTMLResponse:
    row = presets.get(context.session, preset_id)
    check_project(context.session, Permission.SUBMIT_RUN, row.project)
    values = {"priority": "0", "nodes": "1", "devices_per_node": "1", "project": row.project}
    values |= {name: str(value) for name, value in row.place.items()} | {"preset": row.name}
    return form(context, row.recipe, deepcopy(row.config), values)


def _change(text: str) -> tuple[str, object]:
    """Parse path=value. Raises Invalid."""
    path, equals, value = text.partition("=")
    try:
        if PATH.fullmatch(path) and equals:
            return path, json.loads(value)
    except ValueError:
        pass
    raise Invalid({"set": f"{text:.100} is not valid; allowed: a setting's path=value, as JSON"})


@router.post("/runs/new", ANY_SUBMITTER)
@unaudited("Shows a form: nothing is stored.")
def other_recipe(context: Context, posted: Posted) -> HTMLResponse:
    """Show the form of another recipe, with the changed values that it accepts."""
    recipe, other = str(posted.get("recipe", "")), str(posted.get("other", ""))
    values = {name: str(posted.get(name, "")).strip() for name in RUN_FIELDS}
    values |= dict.fromkeys(("parent_id", "parent_step", "compared_with"), "")
    offered = workers.recipes(context.session)
    before, after = workers.named(offered, recipe), workers.named(offered, other)
    config: JsonObject = {}
    refused: list[str] = []
    if before and after:
        typed = forms.read(before["schema"], posted)
        config, refused = forms.carry_over(before["schema"], after["schema"], typed)
    return form(context, other, config, values, refused=refused)


def _lost(_user: AdmittedEarly, posted: Posted, settings: TheSettings) -> dict[str, str]:
    return weight_uploads.lost(settings, {"weights": {"upload": posted.get(SETTING)}})


#: Checked before the session opens, so that no transaction waits for a bucket.
Lost = Annotated[dict[str, str], Depends(_lost)]


@router.post("/runs", ANY_SUBMITTER)
def submit_run(lost: Lost, context: Context, posted: Posted) -> Response:
    """Queue the run, or show the form with its errors."""
    recipe = str(posted.get("recipe", ""))
    values = {name: str(posted.get(name, "")).strip() for name in RUN_FIELDS}
    config: JsonObject = {}
    try:
        config = forms.read(workers.recipe(context.session, recipe)["schema"], posted)
        options, errors = numbers(values, posted)
        texts = {name: values[name] for name in ("name", "tags", "project")}
        options["preemptible"] = bool(values["preemptible"])
        submission = Submission(recipe=recipe, config=config, **texts, **options)
        errors |= lost
        if errors:
            raise Invalid(errors | check(context.session, submission).errors)
        run = submit(context.session, context.user, submission)
        audit.set_runs(context.session, [run.id])
    except NotFound as error:
        return form(context, recipe, {}, values, {"recipe": str(error)})
    except Invalid as error:
        return form(context, recipe, config, values, error.errors)
    part = "/precision-plan" if run.task == PRECISION_PLAN else ""
    return context.redirect(f"/runs/{run.id}{part}")


@router.post("/runs/sample", ANY_SUBMITTER)
def submit_sample(session: Db, principal: SignedIn) -> RedirectResponse:
    """Queue the sample run: its recipe's defaults in fp16."""
    schema = workers.recipe(session, workers.SAMPLE_RECIPE)["schema"]
    config = config_schema.with_defaults(schema, {"precision": "fp16"})
    project = next(iter(may_submit_to(session, principal.grants)), "")
    submission = Submission(
        recipe=workers.SAMPLE_RECIPE, config=config, name="first-run", project=project
    )
    run = submit(session, principal.user, submission)
    audit.set_runs(session, [run.id])
    return RedirectResponse(f"/runs/{run.id}", status_code=303)


def numbers(values: dict[str, str], sent: Container[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the integer fields of every run; return the values and the errors.

    sent: the fields of the posted form; those without a null default must not be empty.
    """
    read: JsonObject = dict(WHOLE_NUMBERS)
    errors = {}
    for name in WHOLE_NUMBERS:
        try:
            if values[name]:
                read[name] = int(values[name])
            elif name in sent and WHOLE_NUMBERS[name] is not None:
                low, high = LIMITS[name]
                errors[name] = f"it is empty; allowed: a whole number from {low} to {high}"
        except ValueError:
            errors[name] = f"{values[name]:.100} is not valid; allowed: a whole number"
    return read, errors


def _name(session: Session, recipe: str) -> str:
    """Return the current name of a recipe; runs of an earlier version have its path."""
    offered = workers.named(workers.recipes(session), recipe)
    return str(offered["name"]) if offered else recipe


def _measure(
    session: Session, recipe: dict[str, Any], config: dict[str, object], values: dict[str, str]
) -> dict[str, Measured]:
    """Return what runs of the form's sizes have measured, by precision."""
    whole = config_schema.with_defaults(recipe["schema"], config)
    sizes = {name: forms.input_text(value) for name, value in whole.get("recipe", {}).items()}
    places, _ = numbers(dict.fromkeys(WHOLE_NUMBERS, "") | values, ())
    batch_size = whole.get("training", {}).get("batch_size")
    if not isinstance(batch_size, int | None):  # of a form that is shown with its errors
        return {}
    return estimates.measure(
        session,
        recipes={recipe["name"], recipe.get("reference", recipe["name"])},
        nodes=places["nodes"],
        devices_per_node=places["devices_per_node"],
        batch_size=batch_size,
        has_same_sizes=lambda settings: same_sizes(settings, sizes),
    )


def form(
    context: Context,
    recipe: str,
    config: JsonObject,
    values: dict[str, str],
    errors: dict[str, str] | None = None,
    refused: Sequence[str] = (),
) -> HTMLResponse:
    """Show the form with these values and errors."""
    session = context.session
    offered = workers.recipes(session)
    chosen = workers.named(offered, recipe)
    problem = (errors or {}).get("recipe", "")
    if recipe and chosen is None:
        problem = f"No worker offers the recipe {recipe!r}. Choose one below."
    chosen = chosen or workers.usual_recipe(offered)
    schema = chosen["schema"] if chosen else {}
    everyone = workers.all_workers(session)
    projects = may_submit_to(session, context.principal.grants)
    main, field_sets = forms.main_settings(forms.field_sets(schema, config, errors or {}))
    return context.render(
        "submission/new_run.html",
        offered=offered,
        offers_commands=not check_commands(session, context.user)
        and workers.offer_commands(session),
        chosen=chosen,
        outdated=workers.describe_outdated_workers(session),
        problem=problem,
        broken=[row for worker, _ in everyone for row in worker.recipes if "error" in row],
        precisions={p for worker, up in everyone if up for p in workers.precisions(worker.devices)},
        workers_up=any(alive for _worker, alive in everyone),
        precision=forms.precision_input(schema, config, errors or {}) if chosen else None,
        measured=_measure(session, chosen, config, values) if chosen else {},
        main=main,
        field_sets=field_sets,
        projects=projects,
        presets=presets.list_presets(session, projects, chosen["name"]) if chosen else [],
        values=dict.fromkeys((*RUN_FIELDS, "preset"), "") | values,
        errors=errors,
        titles={field.path: field.title for field in config_schema.properties(schema)},
        refused=refused,
        largest_upload=weight_uploads.largest_bytes(context.request.app.state.settings),
    )
