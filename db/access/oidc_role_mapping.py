"""Mapping of OIDC groups to roles in projects."""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy.orm import Session

from db.access import accounts, projects
from db.access.permissions import ROLES
from db.errors import Conflict
from db.tables import User

#: A group with all users.
ANY_GROUP = "*"
ADMIN = "admin"


class Rule(NamedTuple):
    """A rule that gives members of a group a role in a project, or makes them admins."""

    group: str
    role: str
    project: str


def parse(text: str) -> list[Rule]:
    """Read "group=role@project, group=role, group=admin". Raises ValueError."""
    rules = []
    for word in filter(None, map(str.strip, text.split(","))):
        group, equals, given = word.rpartition("=")
        role, _, project = given.partition("@")
        if not equals or not group.strip() or role.strip() not in (*ROLES, ADMIN):
            allowed = f"group=role or group=role@project, role one of {', '.join(ROLES)}, {ADMIN}"
            raise ValueError(f"{word!r} is not valid; allowed: {allowed}")
        rules.append(Rule(group.strip(), role.strip(), project.strip()))
    return rules


def apply(session: Session, user: User, rules: list[Rule], groups: Collection[str]) -> None:
    """Grant a user the roles of the groups, the strongest per project, and revoke the others.

    Projects that no rule names are not changed.
    """
    given: dict[str, list[str]] = defaultdict(list)
    for rule in rules:
        if rule.role != ADMIN:
            given[rule.project] += [rule.role] if rule.group in groups else []
    for project, roles in given.items():
        if project != projects.DEFAULT:
            projects.get_or_create(session, project)
        if roles:
            projects.set_role(session, user, project, max(roles, key=ROLES.index))
        else:
            projects.take_role(session, user, project)
    admins = {rule.group for rule in rules if rule.role == ADMIN}
    if admins:
        _set_admin(session, user, is_admin=not admins.isdisjoint(groups))


def _set_admin(session: Session, user: User, *, is_admin: bool) -> None:
    if user.is_admin != is_admin:
        try:
            accounts.set_admin(session, user, is_admin=is_admin)
        except Conflict:
            return  # the last admin stays
