"""Presets of the form of a new run: what one keeps of a submission that could be queued."""

from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
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
    wanted: Submission,
    *,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Preset:
    """Save what a run would be submitted with, in place of the project's preset of that name.

    known: what was found to be wrong with it before.  Raises NotFound, Forbidden, Invalid.
    """
    project = wanted.project
    if project is None:
        project = usual_project(session, user)
    check_project(session, Permission.SUBMIT_RUN, project)
    wanted = wanted.model_copy(update={"project": project})
    if wrong := {**known, **check(session, wanted).errors}:
        raise Invalid(wrong)
    schema = workers.recipe(session, wanted.recipe)["schema"]
    whole = config_schema.with_defaults(schema, wanted.config)
    config, _none = forms.carried(schema, schema, whole)
    place = wanted.model_dump(include=set(presets.PLACE))
    return presets.save(
        session, user, project, name, recipe=wanted.recipe, config=config, place=place
    )
