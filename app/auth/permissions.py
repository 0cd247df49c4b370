"""Permissions of routes: each declares what it requires, with app.auth.routing or `requires`.

A route of app.auth.routing checks what it declares. Another one does so only with the parameter
`SignedIn`, `Uploader` or `AdmittedEarly` (app.auth.authentication): without one it is public. With
one and without a declaration it requires an admin. Tests walk all routes and fail on one that has
no declaration, or needs no sign-in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Request
from sqlalchemy.orm import Session

from app.dependencies import SAFE_METHODS
from db.access import permissions
from db.access.permissions import ACTIONS, PERMISSIONS_OF_TOKENS, Grants, Permission
from db.errors import HalfstepError, NotFound
from db.tables import CONTROL, FULL, LARGEST_ID, READ, SUBMIT, Run, Sweep, User


class Forbidden(HalfstepError):
    """Your role does not allow this."""


#: Any signed-in user: the route is limited to the user's own data or projects, or checks the
#: permissions for its body itself.
SIGNED_IN = "signed-in"
#: The user's own data, or data that outlives the token that created it: alert rules and channels,
#: views, tokens, read-only links, presets, roles. Not for a token of one project.
ACCOUNT = "account"
#: Users who may submit to at least one project.
ANY_SUBMITTER = "submitter"
#: Users who may submit command lines; admins of the instance.
RUN_COMMANDS, ADMIN = "command", "operate"
#: Holders of a read-only link, for its runs only; not by a sign-in.
SHARED_LINK = "link"

#: The error for users without such a project.
NO_SUBMITTING = "Your role does not allow submitting runs; ask a maintainer of a project."
OF_ONE_PROJECT = (
    "This token is limited to one project: it gives no access to the account, command lines or "
    "settings of the server. Use a token for all projects, or sign in."
)
NAMES = MappingProxyType({Run: "run", Sweep: "sweep"})
#: Descriptions of the scopes of tokens.
KINDS = MappingProxyType(
    {
        READ: "read",
        SUBMIT: "read and submit",
        CONTROL: "read, submit and control runs",
    }
)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Access:
    """Requirements of a route on the user or token of a request."""

    #: A permission on the run or sweep in the path, or one of the constants above.
    need: str = ADMIN
    #: A route that checks its body itself: a token with this permission may use it, too.
    token_permission: Permission | None = None
    #: STREAM, EXPORT or DOWNLOAD: a request that can last long, counted against that limit.
    lasts: str = ""
    #: A token that uploads watched runs may use it, too.
    for_uploads: bool = False


def requires(
    need: str,
    *,
    token_permission: Permission | None = None,
    lasts: str = "",
    for_uploads: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Declare what a route requires; used below the decorator that registers the route."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["access"] = Access(need, token_permission, lasts, for_uploads)
        return endpoint

    return declare


def access_of(endpoint: object) -> Access:
    """Return what a route declares: an admin if it declares nothing. Checks nothing."""
    access: Access = getattr(endpoint, "access", Access())
    return access


def admit(
    request: Request,
    session: Session,
    user: User,
    grants: Grants,
    kind: str = FULL,
    only: str | None = None,
) -> None:
    """Check that the user may use a route on the run or sweep of its path.

    kind: scope of the token.  only: the one project of the token; such a token uses no route that
    requires ACCOUNT, RUN_COMMANDS or ADMIN.  Raises NotFound for what the user may not see, and
    Forbidden for what the user may not do.
    """
    access = access_of(request.scope["endpoint"])
    need = access.need
    if kind != FULL:
        _check_token(kind, request.method, access)
    if only is not None and need in (ACCOUNT, RUN_COMMANDS, ADMIN):
        raise Forbidden(OF_ONE_PROJECT)
    if need == ACCOUNT:
        need = Permission.VIEW_RUN if "run_id" in request.path_params else SIGNED_IN
    if need == SIGNED_IN or (user.is_admin and need in (RUN_COMMANDS, ADMIN)):
        return
    if need == ADMIN:
        raise Forbidden("Only an admin may do this.")
    if need == ANY_SUBMITTER:
        if not grants.may_in_any_project(Permission.SUBMIT_RUN):
            raise Forbidden(NO_SUBMITTING)
        return
    if need == RUN_COMMANDS:
        if not user.runs_commands:
            raise Forbidden("Command lines require a separate permission, which an admin grants.")
        return
    if user.is_admin and kind == FULL and only is None:
        return  # the route itself reports what does not exist
    table = Run if "run_id" in request.path_params else Sweep
    text = str(request.path_params.get("run_id") or request.path_params["sweep_id"])
    is_number = text.isdecimal() and len(text) <= len(str(LARGEST_ID))
    if not is_number or int(text) > LARGEST_ID:
        raise NotFound(f"There is no {NAMES[table]} {text[:50]}.")
    check(session, Permission(need), int(text), table)


def check_project(session: Session, permission: Permission, project: str, action: str = "") -> None:
    """Check that the user of the session has a permission in a project.

    action: for the error message, by default that of the permission.  Raises NotFound, Forbidden.
    """
    grants = permissions.limits(session)
    if grants is None or grants.may(permission, project):
        return
    if not grants.may(Permission.VIEW_RUN, project):
        if (
            not project
            and permission == Permission.SUBMIT_RUN
            and not grants.may_in_any_project(permission)
        ):
            raise Forbidden(NO_SUBMITTING)
        raise NotFound(f"There is no project {project[:100]!r}.")
    raise Forbidden(_refusal(permission, project, action))


def _refusal(permission: Permission, project: str, action: str = "") -> str:
    name = f"the project {project!r}" if project else "this project"
    return f"Your role does not allow you to {action or ACTIONS[permission]} {name}."


def _check_token(kind: str, method: str, access: Access) -> None:
    """Check that a token of this scope may use a route at all. Raises Forbidden."""
    most = PERMISSIONS_OF_TOKENS[kind]
    is_allowed = (
        access.need in most
        or (access.need in (SIGNED_IN, ACCOUNT) and method in SAFE_METHODS)
        or access.token_permission in most
    )
    if not is_allowed:
        raise Forbidden(
            f'The scope of this token is "{KINDS[kind]}": create another token for this.'
        )


def check(
    session: Session, permission: Permission, row_id: int, table: type[Run | Sweep] = Run
) -> None:
    """Check that the user of the session has a permission on a run or a sweep.

    Raises NotFound if the user may not see it, and Forbidden if the user may not do this.
    """
    grants = permissions.limits(session)
    if grants is None:
        return
    row = permissions.place_of(session, table, row_id)
    if row is None:
        raise NotFound(f"There is no {NAMES[table]} {row_id}.")
    if not grants.may(permission, row.project, row.owner_id):
        raise Forbidden(_refusal(permission, row.project))
