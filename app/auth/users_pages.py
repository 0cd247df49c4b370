"""Page of the user administration, for admins."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import AtBrowser, Principal, SignedIn
from app.auth.permissions import ADMIN, requires
from app.auth.project_parameters import form_project
from app.dependencies import Db
from app.html.rendering import page
from app.http.parameters import RowId, Text
from app.http.path_prefix import public_address
from db.access import accounts, people, projects
from db.access.permissions import MEMBER, ROLES, Permission
from db.errors import HalfstepError, Invalid

router = APIRouter(prefix="/people")


@router.get("")
@requires(ADMIN)
def show_people(request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show all accounts with their roles."""
    return _people(request, session, principal)


@router.post("")
@requires(ADMIN)
@audited("name", "role", "project")
def invite(
    request: Request,
    session: Db,
    principal: SignedIn,
    _at_browser: AtBrowser,
    project: Annotated[str, form_project(Permission.MANAGE_MEMBERS, default=projects.DEFAULT)],
    name: Annotated[Text, Form()] = "",
    role: Annotated[Text, Form()] = MEMBER,
) -> HTMLResponse:
    """Create an account and show its sign-in link once."""
    try:
        with session.begin_nested():
            user = people.invite(session, name, project=project, role=role)
            token = accounts.make_link_token(session, user)
    except Invalid as error:
        return _people(request, session, principal, name=name, errors=error.errors)
    return _people(request, session, principal, invited=user.name, token=token)


@router.post("/{user_id}/{change}")
@requires(ADMIN)
def change(
    user_id: RowId,
    change: people.Change,
    request: Request,
    session: Db,
    principal: SignedIn,
    _at_browser: AtBrowser,
) -> Response:
    """Change an account; a reset shows a new sign-in link once."""
    user = people.get(session, user_id)
    try:
        people.CHANGES[change](session, user)
    except HalfstepError as error:
        return _people(request, session, principal, errors={"change": str(error)})
    if change == "reset":
        token = accounts.make_link_token(session, user)
        return _people(request, session, principal, invited=user.name, token=token)
    return RedirectResponse("/people", status_code=303)


def _people(
    request: Request,
    session: Session,
    principal: Principal,
    *,
    name: str = "",
    invited: str = "",
    token: str = "",
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    session.flush()
    return page(
        request,
        "auth/users.html",
        principal=principal,
        status_code=422 if errors else 200,
        people=people.listed(session),
        projects=[row.name for row in projects.listed(session)],
        roles=ROLES,
        name=name,
        invited=invited,
        link=f"{public_address(request)}/?token={token}" if token else "",
        errors=errors or {},
    )
