"""Page of projects, roles and quotas."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import Principal, SignedIn
from app.auth.permissions import ACCOUNT, ADMIN, SIGNED_IN, requires
from app.auth.project_parameters import form_project
from app.dependencies import Db, Posted
from app.html.flash import back_to
from app.html.rendering import page
from app.http.parameters import Text
from db.access import people, permissions, projects
from db.access.permissions import ROLES, Permission
from db.errors import Conflict, Invalid, NotFound
from db.queue import quotas
from db.runs import notes

router = APIRouter(prefix="/projects")

Project = Annotated[str, form_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)]


@router.get("")
@requires(SIGNED_IN)
def list_projects(request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show the visible projects with their members."""
    return _projects(request, session, principal)


@router.post("")
@requires(ADMIN)
@audited("name")
def make_project(
    request: Request, session: Db, principal: SignedIn, name: Annotated[Text, Form()] = ""
) -> Response:
    """Create a project."""
    try:
        projects.make(session, name)
    except Invalid as error:
        return _projects(request, session, principal, name=name, errors=error.errors)
    return back_to(request, "/projects", "The project is created.")


@router.post("/name")
@requires(ADMIN)
@audited("project", "new_name")
def rename_project(
    request: Request,
    session: Db,
    principal: SignedIn,
    project: Project,
    new_name: Annotated[Text, Form()] = "",
) -> Response:
    """Rename a project."""
    try:
        projects.rename(session, project, new_name)
    except Invalid as error:
        errors = {"new_name": error.errors["name"]}
        typed = {"new_name": new_name}
        return _projects(request, session, principal, errors=errors, at=project, typed=typed)
    return back_to(request, "/projects", f"The project is renamed to {new_name}.")


@router.post("/deletion")
@requires(ADMIN)
@audited("project")
def delete_project(
    request: Request, session: Db, principal: SignedIn, project: Project
) -> Response:
    """Delete an empty project."""
    try:
        projects.delete_empty(session, project)
    except (Conflict, Invalid) as error:
        errors = {"deletion": str(error)}
        return _projects(request, session, principal, errors=errors, at=project)
    return back_to(request, "/projects", f"The project {project} is deleted.")


@router.post("/change")
@requires(SIGNED_IN)
@audited("project", "viewers_download")
def change_project(
    request: Request,
    session: Db,
    _principal: SignedIn,
    project: Project,
    viewers_download: Annotated[bool, Form()] = False,
) -> Response:
    """Change the permissions of viewers."""
    projects.get(session, project).viewers_download = viewers_download
    return back_to(request, "/projects", "Saved.")


@router.post("/quota")
@requires(ADMIN)
@audited("project", "devices", "queued", "stored_gib", "share")
def set_quota(
    request: Request,
    session: Db,
    principal: SignedIn,
    posted: Posted,
    project: Project,
) -> Response:
    """Set the limits of a project; an empty field is no limit."""
    row = projects.get(session, project)
    typed = {name: str(posted.get(name, "")).strip() for name in quotas.BOUNDS}
    try:
        quotas.set_limits(row, typed)
    except Invalid as error:
        return _projects(request, session, principal, errors=error.errors, at=project, typed=typed)
    return back_to(request, "/projects", "The limits are set.")


@router.post("/roles")
@requires(ACCOUNT)
@audited("user", "role", "project")
def set_role(
    request: Request,
    session: Db,
    principal: SignedIn,
    project: Project,
    user: Annotated[Text, Form()] = "",
    role: Annotated[Text, Form()] = "",
) -> Response:
    """Grant a user a role in a project."""
    try:
        projects.set_role(session, people.named(session, user), project, role)
    except Invalid as error:
        return _projects(request, session, principal, errors=error.errors, at=project)
    except NotFound as error:
        return _projects(request, session, principal, errors={"user": str(error)}, at=project)
    return back_to(request, "/projects", "The role is granted.")


@router.post("/roles/deletion")
@requires(ACCOUNT)
@audited("user", "role", "project")
def take_role(
    request: Request,
    session: Db,
    _principal: SignedIn,
    project: Project,
    user: Annotated[Text, Form()] = "",
) -> Response:
    """Revoke a user's role in a project."""
    projects.take_role(session, people.named(session, user), project)
    return back_to(request, "/projects", "The role is revoked.")


def _projects(
    request: Request,
    session: Session,
    principal: Principal,
    *,
    name: str = "",
    at: str = "",
    errors: dict[str, str] | None = None,
    typed: dict[str, str] | None = None,
) -> HTMLResponse:
    shown = projects.listed(session, principal.grants.projects)
    return page(
        request,
        "projects/projects.html",
        principal=principal,
        status_code=422 if errors else 200,
        projects=[(row, projects.members(session, row.name)) for row in shown],
        may_manage={
            row.name for row in shown if principal.grants.may(Permission.MANAGE_MEMBERS, row.name)
        },
        may_write={
            row.name for row in shown if principal.grants.may(Permission.SUBMIT_RUN, row.name)
        },
        notes=notes.of_projects(session, [row.name for row in shown]),
        roles=ROLES,
        allowed=permissions.PERMISSIONS_OF,
        name=name,
        at=at,
        used=quotas.used(session, [row.name for row in shown]),
        typed=typed or {},
        errors=errors or {},
    )
