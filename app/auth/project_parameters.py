"""The projects that requests name: one dependency resolves them, for every route.

A route declares with `in_project`, `query_project` or `form_project` the permission that it
requires in a named project, and receives a name only if its principal has that permission there. A
test walks all routes and fails on a body, query or form with a project that is not resolved here.
"""

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Form, Query
from pydantic import BaseModel
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import NO_SUBMITTING, check_project
from app.dependencies import Db, Posted
from app.http.parameters import Text
from db.access import projects
from db.access.permissions import Grants, Permission
from db.errors import Invalid
from db.tables import Project

Model = TypeVar("Model", bound=BaseModel)

#: Fields and parameters with the name of an existing project.
FIELD = "project"


def resolve(session: Session, permission: Permission, name: str, action: str = "") -> str:
    """Return the name of a project in which the session's principal has a permission.

    action: for the error message, by default that of the permission.  Raises NotFound, with the
    same text for a hidden and a missing project, and Forbidden.
    """
    check_project(session, permission, name, action)
    return projects.get(session, name).name


def list_permitted(session: Session, grants: Grants, permission: Permission) -> list[str]:
    """Return the projects in which a permission is granted, sorted."""
    known = projects.list_projects(session, grants.projects)
    return [row.name for row in known if grants.may(permission, row.name)]


def errors_of(
    session: Session, grants: Grants, name: str, permission: Permission = Permission.SUBMIT_RUN
) -> dict[str, str]:
    """Return the error of a project without this permission, by field, if any."""
    if grants.may(permission, name) and session.get(Project, name) is not None:
        return {}
    allowed = list_permitted(session, grants, permission)
    if not allowed and permission == Permission.SUBMIT_RUN:
        return {FIELD: NO_SUBMITTING}
    names = ", ".join(map(repr, allowed)) or "none"
    return {FIELD: f"{name[:100]!r} is not valid; allowed: {names}"}


def _declare(dependency: Any, field: str) -> object:
    dependency.__dict__["project_field"] = field
    return Depends(dependency)


def in_project(
    model: type[Model],
    permission: Permission,
    *,
    field: str = FIELD,
    action: str = "",
    is_invalid: bool = False,
    is_created: bool = False,
    empty_is_none: bool = False,
) -> object:
    """Declare a JSON body of this model whose field names a project; null names none.

    The route's parameter must be called `body`.  is_invalid: respond with 422 and the allowed
    projects instead of 404 or 403.  is_created: an administrator's missing project is created, as
    that of a watched run.
    """

    def body_in_project(body: Model, session: Db, principal: SignedIn) -> Model:
        name = getattr(body, field)
        if name is None or (empty_is_none and not name.strip()):
            return body
        grants = principal.grants
        if is_created and grants.is_admin and grants.may(permission, name):
            projects.get_or_create(session, name)
        if is_invalid and (errors := errors_of(session, grants, name, permission)):
            raise Invalid(errors)
        return body.model_copy(update={field: resolve(session, permission, name, action)})

    body_in_project.__annotations__["body"] = model
    return _declare(body_in_project, field)


def query_project(
    permission: Permission,
    *,
    alias: str = FIELD,
    default: str | None = None,
    description: str | None = None,
    is_required: bool = False,
) -> object:
    """Declare a query parameter that names a project. default: None names no project."""

    def project_of_query(session: Db, _principal: SignedIn, name: Any = default) -> str | None:
        return None if name is None else resolve(session, permission, name)

    kind = Text if is_required or default is not None else Text | None
    query = Query(alias=alias, description=description)
    project_of_query.__annotations__["name"] = Annotated[kind, query]
    if is_required:
        project_of_query.__defaults__ = None
    return _declare(project_of_query, alias)


#: A visible project of a page, or None for all; and the same of a list, as the API describes it.
VisibleProject = Annotated[str | None, query_project(Permission.VIEW_RUN)]
ListedProject = Annotated[
    str | None, query_project(Permission.VIEW_RUN, description="Only of this project")
]


def form_project(
    permission: Permission, *, default: str | None = None, none: str | None = None
) -> object:
    """Declare a field of a form that names a project.

    default: of a form without the field.  none: value that names no project, like a null default.
    """

    def project_of_form(
        session: Db,
        _principal: SignedIn,
        posted: Posted,
        name: Annotated[Text | None, Form(alias=FIELD)] = None,
    ) -> str | None:
        if name is None:  # FastAPI reads an empty field, the Default project, as a missing one
            name = projects.DEFAULT if FIELD in posted else default
        if name is None or name == none:
            return None
        return resolve(session, permission, name)

    return _declare(project_of_form, FIELD)


def project_field(dependency: object) -> str | None:
    """Return the field whose project a dependency resolves, if it does."""
    name: str | None = getattr(dependency, "project_field", None)
    return name
