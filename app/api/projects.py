"""Projects, and who has which role in them."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from app.auth import SignedIn
from app.context import Db
from app.parameters import Text
from app.rights import check_project
from db import people, projects
from db.rights import Right

router = APIRouter(prefix="/projects", tags=["people"])


class ProjectRow(BaseModel):
    """A project; '' is the one that there always is."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    viewers_download: Annotated[bool, Field(description="Else they may look, and no more")]


class ProjectName(BaseModel):
    """A project to be made."""

    name: Text


class Member(BaseModel):
    """Somebody with a role in a project."""

    project: Text = projects.DEFAULT
    user: Text
    role: Annotated[Text, Field(description="viewer, member or maintainer")]


@router.get("")
def list_projects(session: Db, visitor: SignedIn) -> list[ProjectRow]:
    """List the projects that you see."""
    found = projects.listed(session, visitor.standing.projects)
    return [ProjectRow.model_validate(each) for each in found]


@router.post("", status_code=201)
def make_project(wanted: ProjectName, session: Db, _visitor: SignedIn) -> ProjectRow:
    """Make a project. For operators."""
    return ProjectRow.model_validate(projects.make(session, wanted.name))


@router.patch("")
def change_project(wanted: ProjectRow, session: Db, _visitor: SignedIn) -> ProjectRow:
    """Change what viewers may do in one. For its maintainers."""
    check_project(session, Right.MANAGE, wanted.name)
    project = projects.get(session, wanted.name)
    project.viewers_download = wanted.viewers_download
    return ProjectRow.model_validate(project)


@router.get("/roles")
def list_members(
    session: Db, _visitor: SignedIn, project: Annotated[Text, Query()] = projects.DEFAULT
) -> list[Member]:
    """List who has which role in one that you see."""
    check_project(session, Right.SEE, project)
    found = projects.members(session, project)
    return [Member(project=project, user=user.name, role=role) for user, role in found]


@router.put("/roles", status_code=204)
def set_role(wanted: Member, session: Db, _visitor: SignedIn) -> None:
    """Give somebody a role, in place of the one before. For maintainers."""
    check_project(session, Right.MANAGE, wanted.project)
    user = people.named(session, wanted.user)
    projects.set_role(session, user, wanted.project, wanted.role)


@router.delete("/roles", status_code=204)
def take_role(
    session: Db,
    _visitor: SignedIn,
    user: Annotated[Text, Query()],
    project: Annotated[Text, Query()] = projects.DEFAULT,
) -> None:
    """Take somebody's role away. For maintainers."""
    check_project(session, Right.MANAGE, project)
    projects.take_role(session, people.named(session, user), project)
