"""Routes of secrets: environment variables of commands, whose values are never shown."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import ADMIN, RUN_COMMANDS, requires
from app.dependencies import Db, TheSettings
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body
from db.access import secrets
from db.paging import page_of_list

router = APIRouter(prefix="/secrets", tags=["secrets"])


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


@router.get("")
@requires(RUN_COMMANDS)
def list_secrets(
    session: Db, _principal: SignedIn, after: After = "", limit: Limit = 1000
) -> Secrets:
    """List the names of the secrets."""
    page = page_of_list(secrets.listed(session), after=after, limit=limit)
    rows = [
        SecretRow(name=secret.name, user=user, set_at=secret.set_at) for secret, user in page.rows
    ]
    return Secrets(secrets=rows, total=page.total, next=page.next)


@router.put("/{name}", status_code=204)
@requires(ADMIN)
def set_secret(
    name: str, secret: SecretValue, session: Db, settings: TheSettings, principal: SignedIn
) -> None:
    """Create or replace a secret, which the commands of all users can use."""
    secrets.put(session, settings.secrets_key, principal.user, name, secret.value)


@router.delete("/{name}", status_code=204)
@requires(ADMIN)
def delete_secret(name: str, session: Db, _principal: SignedIn) -> None:
    """Delete a secret; commands that still name it fail when they start."""
    secrets.delete(session, name)
