"""Saving of presets for the form of a new run."""

from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy.orm import Session

from app.auth.project_parameters import resolve
from app.submission import config_schema, forms
from app.submission.submission import Submission, check, usual_project
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import workers
from db.runs import presets
from db.tables import Preset, User


def save(
    session: Session,
    user: User,
    name: str,
    submission: Submission,
    *,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Preset:
    """Save a valid submission as a preset, replacing the project's preset of that name.

    known: errors that are already known.  Raises NotFound, Forbidden, Invalid.
    """
    project = submission.project
    if project is None:
        project = usual_project(session, user)
    project = resolve(session, Permission.SUBMIT_RUN, project)
    submission = submission.model_copy(update={"project": project})
    if wrong := {**known, **check(session, submission).errors}:
        raise Invalid(wrong)
    schema = workers.recipe(session, submission.recipe)["schema"]
    whole = config_schema.with_defaults(schema, submission.config)
    config, _none = forms.carry_over(schema, schema, whole)
    place = submission.model_dump(include=set(presets.PLACE))
    return presets.save(
        session, user, project, name, recipe=submission.recipe, config=config, place=place
    )
