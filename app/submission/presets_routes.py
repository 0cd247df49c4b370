"""Presets of the form of a new run: routes and forms."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import RedirectResponse, Response
from pydantic import Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, SIGNED_IN, check_project
from app.auth.project_parameters import in_project, query_project
from app.auth.routing import Router
from app.dependencies import Db, Posted
from app.html.rendering import Context
from app.http.parameters import Body, DocumentedModel, RowId, Text, flaw
from app.submission import forms, new_run_pages
from app.submission.new_run_pages import RUN_FIELDS
from app.submission.presets import save
from app.submission.submission import Submission, may_submit_to
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import workers
from db.runs import presets, run_metadata
from db.tables import Preset

api = Router(prefix="/presets", tags=["runs"])
pages = Router(prefix="/presets")


class NewPreset(Body):
    """A preset to save: a named submission."""

    name: Text
    recipe: Annotated[str, Field(description="Name of a recipe that a worker offers")]
    config: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Settings that differ from the recipe's defaults"""
    project: Annotated[Text | None, Field(description="Null: the first one with permission")] = None
    tags: Annotated[str, Field(description="Separated by commas")] = ""
    priority: int = 0
    preemptible: bool = False
    nodes: int = 1
    devices_per_node: int = 1


class PresetRow(DocumentedModel):
    """A saved preset."""

    id: int
    name: str
    recipe: str
    config: dict[str, Any]
    """Settings that differed from the recipe's defaults when it was saved"""
    project: str
    tags: list[str]
    priority: int
    preemptible: bool
    nodes: int
    devices_per_node: int
    saved_at: float


@api.get("", SIGNED_IN)
def list_presets(
    session: Db,
    principal: SignedIn,
    project: Annotated[
        str | None,
        query_project(Permission.VIEW_RUN, description="Only presets of this project"),
    ],
    name: Annotated[Text | None, Query(description="Only presets of this name")] = None,
) -> list[PresetRow]:
    """List the presets of projects to which the user may submit, by name, at most 500."""
    names = may_submit_to(session, principal.grants)
    if project is not None:
        names = [known for known in names if known == project]
    return [_row(preset) for preset in presets.matching(session, names, name=name)]


@api.post("", ACCOUNT, status_code=201)
@audited("name", "recipe", "project")
def save_preset(
    body: Annotated[NewPreset, in_project(NewPreset, Permission.SUBMIT_RUN)],
    session: Db,
    principal: SignedIn,
) -> PresetRow:
    """Save a preset, replacing the project's preset of that name.

    Requires permission to submit to the project.
    """
    if wrong := flaw(body.recipe):
        raise Invalid({"recipe": wrong})
    submission = Submission(**body.model_dump(exclude={"name"}))
    return _row(save(session, principal.user, body.name, submission))


@api.delete("/{preset_id}", ACCOUNT, status_code=204)
def delete_preset(preset_id: RowId, session: Db) -> None:
    """Delete a preset. Requires permission to submit to its project."""
    preset = presets.get(session, preset_id)
    check_project(session, Permission.SUBMIT_RUN, preset.project)
    session.delete(preset)


def _row(preset: Preset) -> PresetRow:
    columns = ("id", "name", "recipe", "config", "project", "saved_at")
    usual = {"priority": 0, "preemptible": False, "nodes": 1, "devices_per_node": 1}
    place = usual | preset.place
    place["tags"] = run_metadata.split_tags(preset.place.get("tags", ""))
    return PresetRow(**{name: getattr(preset, name) for name in columns}, **place)


@pages.post("", ACCOUNT)
@audited("preset", "recipe", "project")
def post_preset(context: Context, posted: Posted) -> Response:
    """Save the form's values under a name, or show the form with its errors."""
    session = context.session
    recipe = str(posted.get("recipe", ""))
    schema = workers.recipe(session, recipe)["schema"]
    values = {name: str(posted.get(name, "")).strip() for name in (*RUN_FIELDS, "preset")}
    config = forms.read(schema, posted)
    try:
        numbers, errors = new_run_pages.numbers(values, posted)
        fields: dict[str, Any] = {name: numbers[name] for name in presets.PLACE if name in numbers}
        fields["tags"] = values["tags"]
        fields["preemptible"] = bool(values["preemptible"])
        fields["project"] = values["project"] or None
        submission = Submission(recipe=recipe, config=config, **fields)
        saved = save(session, context.user, values["preset"], submission, known=errors)
    except Invalid as error:
        # The form's `name` is the run's, which a preset does not store.
        wrong = {"preset" if path == "name" else path: text for path, text in error.errors.items()}
        return new_run_pages.form(context, recipe, config, values, wrong)
    return context.redirect(f"/runs/new?preset={saved.id}", f"The preset {saved.name} is saved.")


@pages.post("/{preset_id}/deletion", ACCOUNT)
def post_deletion(preset_id: RowId, context: Context) -> RedirectResponse:
    """Delete a preset."""
    preset = presets.get(context.session, preset_id)
    check_project(context.session, Permission.SUBMIT_RUN, preset.project)
    context.session.delete(preset)
    return context.redirect(
        f"/runs/new?recipe={preset.recipe}", f"The preset {preset.name} is deleted."
    )
