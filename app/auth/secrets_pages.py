"""Page of secrets: environment variables of commands."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth.authentication import Principal, SignedIn
from app.auth.permissions import ADMIN, RUN_COMMANDS, requires
from app.dependencies import Db, TheSettings
from app.html.rendering import page
from app.http.parameters import Text
from db.access import secrets
from db.errors import Invalid

router = APIRouter(prefix="/secrets")


@router.get("")
@requires(RUN_COMMANDS)
def show_secrets(request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show the names of the secrets, each with the user who set it."""
    return _secrets(request, session, principal)


@router.post("")
@requires(ADMIN)
def set_secret(
    request: Request,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    name: Annotated[Text, Form()] = "",
    value: Annotated[str, Form()] = "",
) -> Response:
    """Create or replace a secret. A form sends CR LF line ends, which keys do not have."""
    try:
        text = value.replace("\r\n", "\n").strip()
        secrets.put(session, settings.secrets_key, principal.user, name.strip(), text)
    except Invalid as error:
        return _secrets(request, session, principal, name, error.errors)
    return RedirectResponse("/secrets", status_code=303)


@router.post("/{name}/deletion")
@requires(ADMIN)
def delete_secret(name: str, session: Db, _principal: SignedIn) -> RedirectResponse:
    """Delete a secret."""
    secrets.delete(session, name)
    return RedirectResponse("/secrets", status_code=303)


def _secrets(
    request: Request,
    session: Session,
    principal: Principal,
    name: str = "",
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    return page(
        request,
        "auth/secrets.html",
        principal=principal,
        status_code=422 if errors else 200,
        secrets=secrets.listed(session),
        name=name,
        errors=errors or {},
    )
