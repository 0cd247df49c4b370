"""Projects, roles and quotas: routes and page."""

from typing import Annotated

from fastapi import Form
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, ADMIN, SIGNED_IN
from app.auth.project_parameters import form_project, in_project, query_project
from app.auth.routing import Router
from app.dependencies import Db, Posted
from app.html.rendering import Context
from app.http.parameters import Body, FormText, Text
from db.access import people, permissions, projects
from db.access.permissions import ROLES, Permission
from db.errors import Conflict, Invalid, NotFound
from db.queue import quotas
from db.runs import notes
from db.tables import Project

api = Router(prefix="/projects", tags=["people"])
pages = Router(prefix="/projects")


class ProjectChange(Body):
    """Changes by maintainers of a project; '' is the Default project."""

    name: Text
    viewers_download: Annotated[bool, Field(description="Whether viewers may download files")]


class Quota(Body):
    """Limits of a project's runs; null is no limit."""

    name: Text
    devices: Annotated[float | None, Field(description="Concurrent devices in use")] = None
    queued: Annotated[float | None, Field(description="Runs in the queue")] = None
    stored_gib: float | None = None
    """Checkpoints, artifacts, images of reports, including the trash"""
    share: float = 1.0
    """Weight: the project with the fewest devices per share goes first"""


class ProjectRow(BaseModel):
    """A project with its limits and usage."""

    name: str
    viewers_download: bool
    devices: int | None
    queued: int | None
    stored_gib: float | None
    share: float
    devices_used: int
    queued_used: int
    stored_bytes: int


class ProjectName(Body):
    """A project to create."""

    name: Text


class Rename(Body):
    """Current and new name of a project."""

    name: Text
    new_name: Text


class Member(Body):
    """A user with a role in a project."""

    project: Text = projects.DEFAULT
    user: Text
    role: Annotated[Text, Field(description="viewer, member or maintainer")]


@api.get("", SIGNED_IN)
def list_projects(session: Db, principal: SignedIn) -> list[ProjectRow]:
    """List the visible projects."""
    return _rows(session, projects.list_projects(session, principal.grants.projects))


@api.post("", ADMIN, status_code=201)
@audited("name")
def make_project(body: ProjectName, session: Db) -> ProjectRow:
    """Create a project. For admins."""
    return _rows(session, [projects.make(session, body.name)])[0]


@api.patch("", SIGNED_IN)
@audited("name", "viewers_download")
def change_project(
    body: Annotated[
        ProjectChange,
        in_project(ProjectChange, Permission.MANAGE_MEMBERS, field="name", action="change"),
    ],
    session: Db,
) -> ProjectRow:
    """Change the permissions of viewers. For maintainers."""
    project = projects.get(session, body.name)
    project.viewers_download = body.viewers_download
    return _rows(session, [project])[0]


@api.patch("/name", ADMIN)
@audited("name", "new_name")
def rename_project(
    body: Annotated[Rename, in_project(Rename, Permission.MANAGE_MEMBERS, field="name")],
    session: Db,
) -> ProjectRow:
    """Rename a project with its runs, sweeps, roles, tokens and rules. For admins."""
    return _rows(session, [projects.rename(session, body.name, body.new_name)])[0]


@api.delete("", ADMIN, status_code=204)
@audited("name")
def delete_project(
    session: Db,
    name: Annotated[str, query_project(Permission.MANAGE_MEMBERS, alias="name", is_required=True)],
) -> None:
    """Delete a project without runs, with its sweeps. For admins."""
    projects.delete_empty(session, name)


@api.put("/quota", ADMIN)
@audited("name", "devices", "queued", "stored_gib", "share")
def set_quota(
    body: Annotated[Quota, in_project(Quota, Permission.MANAGE_MEMBERS, field="name")],
    session: Db,
) -> ProjectRow:
    """Set the limits of a project; omitted ones are removed. For admins."""
    project = projects.get(session, body.name)
    quotas.set_limits(project, body.model_dump(exclude={"name"}))
    session.flush()
    return _rows(session, [project])[0]


def _rows(session: Session, rows: list[Project]) -> list[ProjectRow]:
    used = quotas.read_usage(session, [row.name for row in rows])
    columns = ProjectRow.model_fields.keys() & set(Project.__table__.columns.keys())
    return [
        ProjectRow(**{name: getattr(row, name) for name in columns}, **used[row.name])
        for row in rows
    ]


@api.get("/roles", SIGNED_IN)
def list_members(
    session: Db,
    project: Annotated[str, query_project(Permission.VIEW_RUN, default=projects.DEFAULT)],
) -> list[Member]:
    """List the members of a visible project with their roles."""
    rows = projects.members(session, project)
    return [Member(project=project, user=user.name, role=role) for user, role in rows]


@api.put("/roles", ACCOUNT, status_code=204)
@audited("user", "role", "project")
def set_role(
    body: Annotated[Member, in_project(Member, Permission.MANAGE_MEMBERS)],
    session: Db,
) -> None:
    """Grant a user a role, which replaces the previous one. For maintainers."""
    user = people.named(session, body.user)
    projects.set_role(session, user, body.project, body.role)


@api.delete("/roles", ACCOUNT, status_code=204)
@audited("user", "role", "project")
def take_role(
    session: Db,
    user: Text,
    project: Annotated[str, query_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)],
) -> None:
    """Revoke a user's role. For maintainers."""
    projects.take_role(session, people.named(session, user), project)


ManagedProject = Annotated[str, form_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)]


@pages.get("", SIGNED_IN)
def show_projects(context: Context) -> HTMLResponse:
    """Show the visible projects with their members."""
    return _projects(context)


@pages.post("", ADMIN)
@audited("name")
def post_project(context: Context, name: FormText = "") -> Response:
    """Create a project."""
    try:
        projects.make(context.session, name)
    except Invalid as error:
        return _projects(context, name=name, errors=error.errors)
    return context.redirect("/projects", "The project is created.")


@pages.post("/name", ADMIN)
@audited("project", "new_name")
def post_name(context: Context, project: ManagedProject, new_name: FormText = "") -> Response:
    """Rename a project."""
    try:
        projects.rename(context.session, project, new_name)
    except Invalid as error:
        errors = {"new_name": error.errors["name"]}
        typed = {"new_name": new_name}
        return _projects(context, errors=errors, at=project, typed=typed)
    return context.redirect("/projects", f"The project is renamed to {new_name}.")


@pages.post("/deletion", ADMIN)
@audited("project")
def post_deletion(context: Context, project: ManagedProject) -> Response:
    """Delete an empty project."""
    try:
        projects.delete_empty(context.session, project)
    except (Conflict, Invalid) as error:
        errors = {"deletion": str(error)}
        return _projects(context, errors=errors, at=project)
    return context.redirect("/projects", f"The project {project} is deleted.")


@pages.post("/change", SIGNED_IN)
@audited("project", "viewers_download")
def post_change(
    context: Context, project: ManagedProject, viewers_download: Annotated[bool, Form()] = False
) -> Response:
    """Change the permissions of viewers."""
    projects.get(context.session, project).viewers_download = viewers_download
    return context.redirect("/projects", "Saved.")


@pages.post("/quota", ADMIN)
@audited("project", "devices", "queued", "stored_gib", "share")
def post_quota(context: Context, posted: Posted, project: ManagedProject) -> Response:
    """Set the limits of a project; an empty field is no limit."""
    row = projects.get(context.session, project)
    typed = {name: str(posted.get(name, "")).strip() for name in quotas.BOUNDS}
    try:
        quotas.set_limits(row, typed)
    except Invalid as error:
        return _projects(context, errors=error.errors, at=project, typed=typed)
    return context.redirect("/projects", "The limits are set.")


@pages.post("/roles", ACCOUNT)
@audited("user", "role", "project")
def post_role(
    context: Context, project: ManagedProject, user: FormText = "", role: FormText = ""
) -> Response:
    """Grant a user a role in a project."""
    try:
        projects.set_role(context.session, people.named(context.session, user), project, role)
    except (Invalid, NotFound) as error:
        errors = error.errors if isinstance(error, Invalid) else {"user": str(error)}
        return _projects(context, errors=errors, at=project, typed={"user": user, "role": role})
    return context.redirect("/projects", "The role is granted.")


@pages.post("/roles/deletion", ACCOUNT)
@audited("user", "role", "project")
def post_role_deletion(context: Context, project: ManagedProject, user: FormText = "") -> Response:
    """Revoke a user's role in a project."""
    projects.take_role(context.session, people.named(context.session, user), project)
    return context.redirect("/projects", "The role is revoked.")


def _projects(
    context: Context,
    *,
    name: str = "",
    at: str = "",
    errors: dict[str, str] | None = None,
    typed: dict[str, str] | None = None,
) -> HTMLResponse:
    session, principal = context.session, context.principal
    shown = projects.list_projects(session, principal.grants.projects)
    return context.render(
        "projects/projects.html",
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
        used=quotas.read_usage(session, [row.name for row in shown]),
        typed=typed or {},
        errors=errors,
    )
