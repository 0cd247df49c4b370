"""Secrets, environment variables of commands, whose values are never shown: routes and page."""

from typing import Annotated

from fastapi import Form
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import ADMIN, RUN_COMMANDS
from app.auth.routing import Router
from app.dependencies import Db, TheSettings
from app.html.rendering import Context
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, FormText
from db.access import secrets
from db.errors import Invalid
from db.paging import page_of_list

api = Router(prefix="/secrets", tags=["secrets"])
pages = Router(prefix="/secrets")


class SecretValue(Body):
    """The value of a secret."""

    value: Annotated[str, Field(description="At least 8 characters. It is never shown again")]


class SecretRow(BaseModel):
    """A secret, without its value."""

    name: str
    user: Annotated[str, Field(description="User who set it")]
    set_at: float


class Secrets(ListPage):
    """Secrets by name."""

    secrets: list[SecretRow]


@api.get("", RUN_COMMANDS)
def list_secrets(session: Db, after: After = "", limit: Limit = 1000) -> Secrets:
    """List the names of the secrets."""
    listed = page_of_list(secrets.list_secrets(session), after=after, limit=limit)
    rows = [
        SecretRow(name=secret.name, user=user, set_at=secret.set_at) for secret, user in listed.rows
    ]
    return Secrets(secrets=rows, total=listed.total, next=listed.next)


@api.put("/{name}", ADMIN, status_code=204)
def set_secret(
    name: str, secret: SecretValue, session: Db, settings: TheSettings, principal: SignedIn
) -> None:
    """Create or replace a secret, which the commands of all users can use."""
    secrets.put(session, settings.secrets_key, principal.user, name, secret.value)


@api.delete("/{name}", ADMIN, status_code=204)
def delete_secret(name: str, session: Db) -> None:
    """Delete a secret; commands that still name it fail when they start."""
    secrets.delete(session, name)


@pages.get("", RUN_COMMANDS)
def show_secrets(context: Context) -> HTMLResponse:
    """Show the names of the secrets, each with the user who set it."""
    return _secrets(context)


@pages.post("", ADMIN)
def post_secret(
    context: Context, name: FormText = "", value: Annotated[str, Form()] = ""
) -> Response:
    """Create or replace a secret. A form sends CR LF line ends, which keys do not have."""
    try:
        text = value.replace("\r\n", "\n").strip()
        secrets.put(
            context.session,
            context.settings.secrets_key,
            context.user,
            name.strip(),
            text,
        )
    except Invalid as error:
        return _secrets(context, name, error.errors)
    return context.redirect("/secrets")


@pages.post("/{name}/deletion", ADMIN)
def post_deletion(name: str, session: Db) -> RedirectResponse:
    """Delete a secret."""
    secrets.delete(session, name)
    return RedirectResponse("/secrets", status_code=303)


def _secrets(
    context: Context, name: str = "", errors: dict[str, str] | None = None
) -> HTMLResponse:
    return context.render(
        "auth/secrets.html", secrets=secrets.list_secrets(context.session), name=name, errors=errors
    )
