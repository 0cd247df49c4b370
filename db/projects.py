"""Projects, and who has which role in them."""

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.errors import Invalid, NotFound
from db.names import checked_name, key_of
from db.rights import ROLES
from db.tables import Membership, Project, User

#: The project of all runs of which nobody says another.
DEFAULT = ""
NAME_CHARACTERS = 200


def get(session: Session, name: str) -> Project:
    """Return a project. Raises NotFound."""
    project = session.get(Project, name)
    if project is None:
        raise NotFound(f"There is no project {name[:100]!r}.")
    return project


def listed(session: Session, names: Sequence[str] | None = None) -> list[Project]:
    """List projects by name. names: these alone."""
    query = select(Project).order_by(Project.name)
    return list(session.scalars(query if names is None else query.where(Project.name.in_(names))))


def make(session: Session, name: str) -> Project:
    """Make a project. Raises Invalid if there is one of that name, or it cannot be one."""
    name = checked_name(name, most=NAME_CHARACTERS)
    for other in session.scalars(select(Project.name)):
        if key_of(other) == key_of(name):
            raise Invalid({"name": f"there is a project {other!r}; allowed: another name"})
    project = Project(name=name)
    session.add(project)
    session.flush()
    return project


def found_or_made(session: Session, name: str) -> Project:
    """Return a project, made now if there is none. Raises Invalid."""
    if (project := session.get(Project, name)) is not None:
        return project
    project = Project(name=checked_name(name, most=NAME_CHARACTERS))
    try:
        with session.begin_nested():
            session.add(project)
    except IntegrityError:  # somebody else has made it meanwhile
        return get(session, project.name)
    return project


def members(session: Session, name: str) -> list[tuple[User, str]]:
    """List who has a role in a project, by name, with the role."""
    query = select(User, Membership.role).join(Membership, Membership.user_id == User.id)
    query = query.where(Membership.project == name, User.removed_at.is_(None)).order_by(User.name)
    return [(user, role) for user, role in session.execute(query)]


def memberships(session: Session, user: User) -> dict[str, str]:
    """Return somebody's role by project, in order of these."""
    query = select(Membership.project, Membership.role).where(Membership.user_id == user.id)
    return {row[0]: row[1] for row in session.execute(query.order_by(Membership.project))}


def set_role(session: Session, user: User, project: str, role: str) -> None:
    """Give somebody a role in a project, in place of the one before. Raises Invalid, NotFound."""
    if role not in ROLES:
        raise Invalid({"role": f"{role[:100]!r} is not allowed; allowed: {', '.join(ROLES)}"})
    get(session, project)
    session.merge(Membership(project=project, user_id=user.id, role=role))


def take_role(session: Session, user: User, project: str) -> None:
    """Let somebody have no role in a project any more."""
    mine = (Membership.project == project, Membership.user_id == user.id)
    session.execute(delete(Membership).where(*mine))
