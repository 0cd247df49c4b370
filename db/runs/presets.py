"""Presets: named values for the form of a new run, per project."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.access import projects
from db.errors import Invalid, NotFound
from db.names import check_name
from db.tables import Preset, Project, User

#: Limits on the presets of one project and on the length of a name.
MOST, NAME_CHARACTERS = 50, 60
#: Presets of all projects that are listed at once.
MOST_LISTED = 500
#: Fields common to all runs that a preset stores.
PLACE = ("tags", "priority", "preemptible", "nodes", "devices_per_node")


def list_presets(session: Session, names: Collection[str], recipe: str) -> Sequence[Preset]:
    """List the presets of a recipe in these projects, by name."""
    query = select(Preset).where(Preset.project.in_(names), Preset.recipe == recipe)
    return session.scalars(query.order_by(Preset.name, Preset.project).limit(MOST)).all()


def matching(
    session: Session, names: Collection[str], *, name: str | None = None
) -> Sequence[Preset]:
    """List the presets of these projects, by name. name: only presets of this name."""
    query = select(Preset).where(Preset.project.in_(names))
    if name is not None:
        query = query.where(Preset.name == name)
    return session.scalars(query.order_by(Preset.name, Preset.project).limit(MOST_LISTED)).all()


def get(session: Session, preset_id: int) -> Preset:
    """Return a preset. Raises NotFound."""
    if (preset := session.get(Preset, preset_id)) is None:
        raise NotFound(f"There is no preset {preset_id}.")
    return preset


def save(
    session: Session,
    user: User,
    project: str,
    name: str,
    *,
    recipe: str,
    config: Mapping[str, object],
    place: Mapping[str, Any],
) -> Preset:
    """Save a preset, replacing the project's preset of the same name. Raises Invalid.

    config: the settings that differ from the recipe's defaults.
    """
    name = check_name(name, most=NAME_CHARACTERS)
    projects.get(session, project)
    # Of two concurrent saves, the second waits.
    session.execute(select(Project.name).where(Project.name == project).with_for_update())
    preset = session.scalar(
        select(Preset).where(Preset.project == project, Preset.name == name)
    ) or Preset(project=project, name=name)
    if preset.id is None and _count(session, project) >= MOST:
        raise Invalid({"name": f"this project has {MOST} presets, the maximum"})
    preset.recipe, preset.config, preset.user_id = recipe, dict(config), user.id
    preset.place = {field: place[field] for field in PLACE if place.get(field)}
    session.add(preset)
    session.flush()
    return preset


def _count(session: Session, project: str) -> int:
    return session.scalar(select(func.count()).where(Preset.project == project)) or 0
