"""Projects, and who has which role in them."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, ADMIN, SIGNED_IN, check_project, requires
from app.dependencies import Db
from app.http.parameters import Body, Text
from db.access import people, projects
from db.access.permissions import Permission
from db.queue import quotas
from db.tables import Project

router = APIRouter(prefix="/projects", tags=["people"])


class ProjectChange(Body):
    """What maintainers change of a project; '' is the one that there always is."""

    name: Text
    viewers_download: Annotated[bool, Field(description="Else they may look, and no more")]


class Quota(Body):
    """What the runs of a project may use at once; null is no limit."""

    name: Text
    devices: Annotated[float | None, Field(description="In training at once")] = None
    queued: Annotated[float | None, Field(description="Runs in the queue")] = None
    stored_gib: Annotated[
        float | None, Field(description="Of checkpoints and artifacts, the trash's included")
    ] = None
    share: Annotated[
        float, Field(description="Of two projects, that with fewer devices for it goes first")
    ] = 1.0


class ProjectRow(BaseModel):
    """A project, what it may use, and what it does."""

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
    """A project to be made."""

    name: Text


class Rename(Body):
    """What a project is called, and shall be."""

    name: Text
    new_name: Text


class Member(Body):
    """Somebody with a role in a project."""

    project: Text = projects.DEFAULT
    user: Text
    role: Annotated[Text, Field(description="viewer, member or maintainer")]


@router.get("")
@requires(SIGNED_IN)
def list_projects(session: Db, principal: SignedIn) -> list[ProjectRow]:
    """List the projects that you see."""
    return _rows(session, projects.listed(session, principal.grants.projects))


@router.post("", status_code=201)
@requires(ADMIN)
@audited("name")
def make_project(wanted: ProjectName, session: Db, _principal: SignedIn) -> ProjectRow:
    """Make a project. For operators."""
    return _rows(session, [projects.make(session, wanted.name)])[0]


@router.patch("")
@requires(SIGNED_IN)
@audited("name", "viewers_download")
def change_project(wanted: ProjectChange, session: Db, _principal: SignedIn) -> ProjectRow:
    """Change what viewers may do in one. For its maintainers."""
    check_project(session, Permission.MANAGE_MEMBERS, wanted.name, "change")
    project = projects.get(session, wanted.name)
    project.viewers_download = wanted.viewers_download
    return _rows(session, [project])[0]


@router.patch("/name")
@requires(ADMIN)
@audited("name", "new_name")
def rename_project(wanted: Rename, session: Db, _principal: SignedIn) -> ProjectRow:
    """Call a project otherwise; its runs, sweeps, roles, tokens and rules stay its own. For
    operators.
    """
    return _rows(session, [projects.rename(session, wanted.name, wanted.new_name)])[0]


@router.delete("", status_code=204)
@requires(ADMIN)
@audited("name")
def delete_project(session: Db, _principal: SignedIn, name: Annotated[Text, Query()]) -> None:
    """Delete a project without runs, with its sweeps. For operators."""
    projects.delete_empty(session, name)


@router.put("/quota")
@requires(ADMIN)
@audited("name", "devices", "queued", "stored_gib", "share")
def set_quota(wanted: Quota, session: Db, _principal: SignedIn) -> ProjectRow:
    """Set what the runs of a project may use; what is left out has no limit. For operators."""
    project = projects.get(session, wanted.name)
    quotas.set_limits(project, wanted.model_dump(exclude={"name"}))
    session.flush()
    return _rows(session, [project])[0]


def _rows(session: Session, found: list[Project]) -> list[ProjectRow]:
    used = quotas.used(session, [each.name for each in found])
    columns = ProjectRow.model_fields.keys() & set(Project.__table__.columns.keys())
    return [
        ProjectRow(**{name: getattr(each, name) for name in columns}, **used[each.name])
        for each in found
    ]


@router.get("/roles")
@requires(SIGNED_IN)
def list_members(
    session: Db, _principal: SignedIn, project: Annotated[Text, Query()] = projects.DEFAULT
) -> list[Member]:
    """List who has which role in one that you see."""
    check_project(session, Permission.VIEW_RUN, project)
    found = projects.members(session, project)
    return [Member(project=project, user=user.name, role=role) for user, role in found]


@router.put("/roles", status_code=204)
@requires(ACCOUNT)
@audited("user", "role", "project")
def set_role(wanted: Member, session: Db, _principal: SignedIn) -> None:
    """Give somebody a role, in place of the one before. For maintainers."""
    check_project(session, Permission.MANAGE_MEMBERS, wanted.project)
    user = people.named(session, wanted.user)
    projects.set_role(session, user, wanted.project, wanted.role)


@router.delete("/roles", status_code=204)
@requires(ACCOUNT)
@audited("user", "role", "project")
def take_role(
    session: Db,
    _principal: SignedIn,
    user: Annotated[Text, Query()],
    project: Annotated[Text, Query()] = projects.DEFAULT,
) -> None:
    """Take somebody's role away. For maintainers."""
    check_project(session, Permission.MANAGE_MEMBERS, project)
    projects.take_role(session, people.named(session, user), project)
