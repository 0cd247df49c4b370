"""Permissions: roles in projects and what they allow, and the row filter of sessions.

A principal's session is limited to visible projects: all its queries of runs, sweeps and presets
(OfProject), and of rows of runs (OfRun), omit the others. This is a second line of defence behind
app.auth.permissions, which checks each route. Queries by `session.connection()` are not limited:
they take a third of the time, and read rows of runs that the session has read before.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from sqlalchemy import Row, event, false, or_, select
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria
from sqlalchemy.sql.base import ExecutableOption

from db.tables import (
    CONTROL,
    FULL,
    ONE_RUN,
    READ,
    SUBMIT,
    WRITE,
    ArtifactCollection,
    CheckReport,
    Delivery,
    Membership,
    OfProject,
    OfRun,
    Preset,
    Project,
    Report,
    Run,
    Sweep,
    User,
)

VIEWER, MEMBER, MAINTAINER = ROLES = ("viewer", "member", "maintainer")


class Permission(StrEnum):
    """Permissions on a project's runs and sweeps."""

    VIEW_RUN = "view_run"
    DOWNLOAD_FILES = "download_files"
    SHARE_RUN = "share_run"
    SUBMIT_RUN = "submit_run"
    CONTROL_OWN_RUN = "control_own_run"
    CONTROL_RUN = "control_run"
    PRIORITIZE_RUN = "prioritize_run"
    DELETE_RUN = "delete_run"
    MOVE_RUN = "move_run"
    MANAGE_MEMBERS = "manage_members"


#: Permissions by role; the project decides whether viewers may download.
PERMISSIONS_OF: Mapping[str, frozenset[Permission]] = MappingProxyType(
    {
        VIEWER: frozenset({Permission.VIEW_RUN}),
        MEMBER: frozenset(
            {
                Permission.VIEW_RUN,
                Permission.DOWNLOAD_FILES,
                Permission.SHARE_RUN,
                Permission.SUBMIT_RUN,
                Permission.CONTROL_OWN_RUN,
            }
        ),
        MAINTAINER: frozenset(Permission),
    }
)
#: Descriptions of permissions for error messages.
ACTIONS = MappingProxyType(
    {
        Permission.VIEW_RUN: "see",
        Permission.DOWNLOAD_FILES: "download of",
        Permission.SHARE_RUN: "share runs of",
        Permission.SUBMIT_RUN: "submit to",
        Permission.CONTROL_OWN_RUN: "control your own runs of",
        Permission.CONTROL_RUN: "control other people's runs of",
        Permission.PRIORITIZE_RUN: "reorder the queue of",
        Permission.DELETE_RUN: "delete runs of",
        Permission.MOVE_RUN: "move runs out of or into",
        Permission.MANAGE_MEMBERS: "give roles in",
    }
)

_GRANTS = "grants"
#: Tables of projects of which a read-only link shows nothing.
BY_NO_LINK = (Sweep, Preset, Report, CheckReport, ArtifactCollection)


@dataclass(frozen=True)
class Grants:
    """Permissions of a user, token or read-only link."""

    user_id: int
    is_admin: bool
    permissions: Mapping[str, frozenset[Permission]]  # by project; ignored for admins
    most: frozenset[Permission] = frozenset(Permission)  # upper bound by the token
    only: str | None = None  # the single project of the token, if any
    # Those of a read-only link, the only visible ones; None: no link.
    runs: frozenset[int] | None = None

    @property
    def projects(self) -> tuple[str, ...] | None:
        """Names of the visible projects, sorted; None: all."""
        if self.only is not None:
            return (self.only,) if self.is_admin or self.only in self.permissions else ()
        return None if self.is_admin else tuple(sorted(self.permissions))

    def covers(self, other: "Grants") -> bool:
        """Return whether these grants include all of others."""
        if self.is_admin or other.is_admin:
            return self.is_admin
        return all(
            permissions <= self.permissions.get(project, frozenset())
            for project, permissions in other.permissions.items()
        )

    def may_in_any_project(self, permission: Permission) -> bool:
        """Return whether a permission is granted in at least one project."""
        projects = self.projects
        return (
            permission in self.most
            if projects is None
            else any(self.may(permission, p) for p in projects)
        )

    def may(self, permission: Permission, project: str, owner_id: int | None = None) -> bool:
        """Return whether a permission is granted in a project. owner_id: owner of the run."""
        if permission not in self.most or self.only not in (None, project):
            return False
        if self.is_admin:
            return True
        permissions = self.permissions.get(project, frozenset())
        is_own = permission == Permission.CONTROL_RUN and owner_id == self.user_id
        return permission in permissions or (is_own and Permission.CONTROL_OWN_RUN in permissions)


_READING = frozenset({Permission.VIEW_RUN, Permission.DOWNLOAD_FILES})
#: Upper bound of the permissions of each kind of token.
PERMISSIONS_OF_TOKENS: Mapping[str, frozenset[Permission]] = MappingProxyType(
    {
        FULL: frozenset(Permission),
        READ: _READING,
        SUBMIT: _READING | {Permission.SUBMIT_RUN},
        CONTROL: frozenset(Permission) - {Permission.MANAGE_MEMBERS, Permission.SHARE_RUN},
        # Of this only to use artifacts and to work sweeps of agents: other routes refuse it.
        WRITE: _READING | {Permission.SUBMIT_RUN},
        ONE_RUN: frozenset({Permission.SUBMIT_RUN}),
    }
)


def grants(session: Session, user: User) -> Grants:
    """Return the grants of a user."""
    permissions = {} if user.is_admin else of_users(session, [user.id])[user.id]
    return Grants(user.id, user.is_admin, permissions)


def with_roles(query: Any) -> object:
    """Add the users' roles to a query, one row per project, as `grants_of` reads them."""
    query = query.add_columns(Membership.project, Membership.role, Project.viewers_download)
    query = query.outerjoin(Membership, Membership.user_id == User.id)
    return query.outerjoin(Project, Project.name == Membership.project)


def grants_of(
    user: User, rows: Iterable[Any], *, kind: str = FULL, only: str | None = None
) -> Grants:
    """Return the grants of a user by a token of this kind, for one project or all.

    rows: with the columns of `with_roles` last.
    """
    roles = (tuple(row)[-3:] for row in rows if not user.is_admin)
    permissions = {
        project: _get_permissions(role, downloads) for project, role, downloads in roles if role
    }
    return Grants(user.id, user.is_admin, permissions, PERMISSIONS_OF_TOKENS[kind], only)


def of_users(
    session: Session, user_ids: Collection[int]
) -> dict[int, dict[str, frozenset[Permission]]]:
    """Return the permissions of these users by user id and project."""
    query = select(
        Membership.user_id, Membership.project, Membership.role, Project.viewers_download
    )
    query = query.join(Project, Project.name == Membership.project)
    result: dict[int, dict[str, frozenset[Permission]]] = {user_id: {} for user_id in user_ids}
    for user_id, project, role, viewers_download in session.execute(
        query.where(Membership.user_id.in_(user_ids))
    ):
        result[user_id][project] = _get_permissions(role, viewers_download)
    return result


def _get_permissions(role: str, viewers_download: bool) -> frozenset[Permission]:
    return PERMISSIONS_OF[role] | ({Permission.DOWNLOAD_FILES} if viewers_download else set())


def seen_by(session: Session, user_ids: Collection[int]) -> dict[int, set[str] | None]:
    """Return the visible projects of each active user; None: all."""
    query = select(User.id, User.is_admin, Membership.project)
    query = query.outerjoin(Membership, Membership.user_id == User.id)
    query = query.where(User.id.in_(user_ids), User.deactivated_at.is_(None))
    result: dict[int, set[str] | None] = {}
    for user_id, is_admin, project in session.execute(query):
        projects = result.setdefault(user_id, None if is_admin else set())
        if projects is not None and project is not None:
            projects.add(project)
    return result


def limit(session: Session, to: Grants) -> None:
    """Limit a session to the projects of these grants from now on."""
    session.info[_GRANTS] = to


def place_of(session: Session, table: type[Run | Sweep], row_id: int) -> Row[str, int] | None:
    """Return the project and the owner_id of a run or a sweep; None if the user may not see it."""
    query = select(table.project, table.owner_id).where(table.id == row_id)
    return session.execute(query).one_or_none()


def limits(session: Session) -> Grants | None:
    """Return the grants of a session; None: unlimited, such as a worker's."""
    grants: Grants | None = session.info.get(_GRANTS)
    return grants


@contextmanager
def lift_limit(session: Session) -> Iterator[None]:
    """Lift a session's limit temporarily; only counts may be shown from it."""
    before = session.info.pop(_GRANTS, None)
    try:
        yield
    finally:
        if before is not None:
            session.info[_GRANTS] = before


#: Sets of projects, and of a link's runs, whose conditions are kept.
CONDITIONS_KEPT = 128
#: Alias of runs for the conditions below, separate from other uses of the table in a statement.
_SEEN = Run.__table__.alias("seen")


@event.listens_for(Session, "do_orm_execute")
def _hide(state: ORMExecuteState) -> None:
    """Limit every query of a session to rows of the projects and runs that its user sees."""
    of = limits(state.session)
    if of is None or of.projects is None or not state.is_select or state.is_column_load:
        return
    visible = _visible(of.projects) if of.runs is None else _visible_by_link(of.runs)
    state.statement = state.statement.options(*visible)


@lru_cache(CONDITIONS_KEPT)  # they take longer to build than many a query to run
def _visible(of: tuple[str, ...]) -> list[ExecutableOption]:
    projects = list(of)
    # Lambdas, so that SQLAlchemy builds a condition once for all tables and binds this list.
    return [
        _condition(OfProject, lambda cls: cls.project.in_(projects)),
        _condition(
            OfRun,
            lambda cls: (
                select(_SEEN.c.id)
                .where(_SEEN.c.id == cls.run_id, _SEEN.c.project.in_(projects))
                .exists()
            ),
        ),
        _condition(
            Delivery,
            lambda cls: or_(
                cls.run_id.is_(None),
                select(_SEEN.c.id)
                .where(_SEEN.c.id == cls.run_id, _SEEN.c.project.in_(projects))
                .exists(),
            ),
        ),
    ]


@lru_cache(CONDITIONS_KEPT)
def _visible_by_link(of: frozenset[int]) -> list[ExecutableOption]:
    runs = list(of)
    return [
        _condition(Run, lambda cls: cls.id.in_(runs)),
        _condition(OfRun, lambda cls: cls.run_id.in_(runs)),
        *(with_loader_criteria(table, false(), include_aliases=True) for table in BY_NO_LINK),
    ]


def _condition(table: type[object], condition: Any) -> ExecutableOption:
    return with_loader_criteria(table, condition, include_aliases=True)
