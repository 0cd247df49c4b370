"""Presets of the form of a new run, of those projects that one may submit to."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, SIGNED_IN, check_project, requires
from app.dependencies import Db
from app.http.parameters import Body, RowId, Text, flaw
from app.submission.presets import save
from app.submission.submission import Submission, may_submit_to
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import presets, run_metadata
from db.tables import Preset

router = APIRouter(prefix="/presets", tags=["runs"])


class PresetWanted(Body):
    """What a run would be submitted with, under a name."""

    name: Text
    recipe: Annotated[str, Field(description="Name of a recipe that a worker offers")]
    config: Annotated[
        dict[str, Any],
        Field(default_factory=dict, description="Settings that are not the recipe's defaults"),
    ]
    project: Annotated[Text | None, Field(description="Null: the first that you may submit to")] = (
        None
    )
    tags: Annotated[str, Field(description="With commas between them")] = ""
    priority: int = 0
    nodes: int = 1
    devices_per_node: int = 1


class PresetRow(BaseModel):
    """One that is saved. config: the settings that were not the recipe's defaults then."""

    id: int
    name: str
    recipe: str
    config: dict[str, Any]
    project: str
    tags: list[str]
    priority: int
    nodes: int
    devices_per_node: int
    saved_at: float


@router.get("")
@requires(SIGNED_IN)
def list_presets(
    session: Db,
    principal: SignedIn,
    name: Annotated[Text | None, Query(description="Those that are called so, alone")] = None,
    project: Annotated[Text | None, Query(description="Of this one alone")] = None,
) -> list[PresetRow]:
    """List the presets of projects that you may submit to, by name, 500 at most."""
    names = may_submit_to(session, principal.grants)
    if project is not None:
        names = [each for each in names if each == project]
    return [_told(each) for each in presets.found(session, names, name=name)]


@router.post("", status_code=201)
@requires(ACCOUNT)
@audited("name", "recipe", "project")
def save_preset(wanted: PresetWanted, session: Db, principal: SignedIn) -> PresetRow:
    """Save a preset, in place of the project's own of that name. For who may submit to it."""
    if wrong := flaw(wanted.recipe):
        raise Invalid({"recipe": wrong})
    submission = Submission(**wanted.model_dump(exclude={"name"}))
    return _told(save(session, principal.user, wanted.name, submission))


@router.delete("/{preset_id}", status_code=204)
@requires(ACCOUNT)
def delete_preset(preset_id: RowId, session: Db, _principal: SignedIn) -> None:
    """Delete a preset. For who may submit to its project."""
    preset = presets.get(session, preset_id)
    check_project(session, Permission.SUBMIT_RUN, preset.project)
    session.delete(preset)


def _told(preset: Preset) -> PresetRow:
    columns = ("id", "name", "recipe", "config", "project", "saved_at")
    place = {"priority": 0, "nodes": 1, "devices_per_node": 1} | preset.place
    place["tags"] = run_metadata.parted(preset.place.get("tags", ""))
    return PresetRow(**{name: getattr(preset, name) for name in columns}, **place)
