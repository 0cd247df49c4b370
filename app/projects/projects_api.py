"""Routes of projects, roles and quotas."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, ADMIN, SIGNED_IN, requires
from app.auth.project_parameters import in_project, query_project
from app.dependencies import Db
from app.http.parameters import Body, Text
from db.access import people, projects
from db.access.permissions import Permission
from db.queue import quotas
from db.tables import Project

router = APIRouter(prefix="/projects", tags=["people"])


class ProjectChange(Body):
    """Changes by maintainers of a project; '' is the Default project."""

    name: Text
    viewers_download: Annotated[bool, Field(description="Whether viewers may download files")]


class Quota(Body):
    """Limits of a project's runs; null is no limit."""

    name: Text
    devices: Annotated[float | None, Field(description="Concurrent devices in use")] = None
    queued: Annotated[float | None, Field(description="Runs in the queue")] = None
    stored_gib: Annotated[
        float | None,
        Field(description="Checkpoints, artifacts, images of reports, including the trash"),
    ] = None
    share: Annotated[
        float,
        Field(description="Weight: the project with the fewest devices per share goes first"),
    ] = 1.0


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


@router.get("")
@requires(SIGNED_IN)
def list_projects(session: Db, principal: SignedIn) -> list[ProjectRow]:
    """List the visible projects."""
    return _rows(session, projects.listed(session, principal.grants.projects))


@router.post("", status_code=201)
@requires(ADMIN)
@audited("name")
def make_project(body: ProjectName, session: Db, _principal: SignedIn) -> ProjectRow:
    """Create a project. For admins."""
    return _rows(session, [projects.make(session, body.name)])[0]


@router.patch("")
@requires(SIGNED_IN)
@audited("name", "viewers_download")
def change_project(
    body: Annotated[
        ProjectChange,
        in_project(ProjectChange, Permission.MANAGE_MEMBERS, field="name", action="change"),
    ],
    session: Db,
    _principal: SignedIn,
) -> ProjectRow:
    """Change the permissions of viewers. For maintainers."""
    project = projects.get(session, body.name)
    project.viewers_download = body.viewers_download
    return _rows(session, [project])[0]


@router.patch("/name")
@requires(ADMIN)
@audited("name", "new_name")
def rename_project(
    body: Annotated[Rename, in_project(Rename, Permission.MANAGE_MEMBERS, field="name")],
    session: Db,
    _principal: SignedIn,
) -> ProjectRow:
    """Rename a project with its runs, sweeps, roles, tokens and rules. For admins."""
    return _rows(session, [projects.rename(session, body.name, body.new_name)])[0]


@router.delete("", status_code=204)
@requires(ADMIN)
@audited("name")
def delete_project(
    session: Db,
    _principal: SignedIn,
    name: Annotated[str, query_project(Permission.MANAGE_MEMBERS, alias="name", is_required=True)],
) -> None:
    """Delete a project without runs, with its sweeps. For admins."""
    projects.delete_empty(session, name)


@router.put("/quota")
@requires(ADMIN)
@audited("name", "devices", "queued", "stored_gib", "share")
def set_quota(
    body: Annotated[Quota, in_project(Quota, Permission.MANAGE_MEMBERS, field="name")],
    session: Db,
    _principal: SignedIn,
) -> ProjectRow:
    """Set the limits of a project; omitted ones are removed. For admins."""
    project = projects.get(session, body.name)
    quotas.set_limits(project, body.model_dump(exclude={"name"}))
    session.flush()
    return _rows(session, [project])[0]


def _rows(session: Session, rows: list[Project]) -> list[ProjectRow]:
    used = quotas.used(session, [row.name for row in rows])
    columns = ProjectRow.model_fields.keys() & set(Project.__table__.columns.keys())
    return [
        ProjectRow(**{name: getattr(row, name) for name in columns}, **used[row.name])
        for row in rows
    ]


@router.get("/roles")
@requires(SIGNED_IN)
def list_members(
    session: Db,
    _principal: SignedIn,
    project: Annotated[str, query_project(Permission.VIEW_RUN, default=projects.DEFAULT)],
) -> list[Member]:
    """List the members of a visible project with their roles."""
    rows = projects.members(session, project)
    return [Member(project=project, user=user.name, role=role) for user, role in rows]


@router.put("/roles", status_code=204)
@requires(ACCOUNT)
@audited("user", "role", "project")
def set_role(
    body: Annotated[Member, in_project(Member, Permission.MANAGE_MEMBERS)],
    session: Db,
    _principal: SignedIn,
) -> None:
    """Grant a user a role, which replaces the previous one. For maintainers."""
    user = people.named(session, body.user)
    projects.set_role(session, user, body.project, body.role)


@router.delete("/roles", status_code=204)
@requires(ACCOUNT)
@audited("user", "role", "project")
def take_role(
    session: Db,
    _principal: SignedIn,
    user: Annotated[Text, Query()],
    project: Annotated[str, query_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)],
) -> None:
    """Revoke a user's role. For maintainers."""
    projects.take_role(session, people.named(session, user), project)
