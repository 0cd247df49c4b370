"""Routes of the user's API tokens."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ACCOUNT, requires
from app.auth.project_parameters import in_project
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from db.access import accounts
from db.access.permissions import Permission

router = APIRouter(prefix="/tokens", tags=["tokens"])


class TokenName(Body):
    """Name, scope, project and lifetime of a token."""

    name: Text
    kind: Annotated[
        Literal["full", "read", "submit", "control", "write", "run"],
        Field(
            description="full: all permissions of the user. read: view and download. submit: read, "
            "and submit runs. control: submit, and control runs. write: only upload watched runs. "
            "run: only upload one watched run."
        ),
    ] = "full"
    project: Annotated[
        Text | None, Field(description="Project that the token is limited to; null: all")
    ] = None
    run_id: Annotated[RowId | None, Field(description="For kind run: the run to upload")] = None
    days: Annotated[int | None, Field(description="Days until it expires; null: never")] = (
        accounts.TOKEN_DAYS
    )


class TokenRow(BaseModel):
    """A token; its secret is not stored."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    name: str
    kind: str
    project: str | None
    run_id: int | None
    created_at: float
    expires_at: float | None
    used_at: float | None


class NewToken(TokenRow):
    """A newly created token."""

    token: Annotated[str, Field(description="The secret. It is not shown again.")]


class Tokens(ListPage):
    """Tokens, newest first."""

    tokens: list[TokenRow]


@router.get("")
@requires(ACCOUNT)
def list_tokens(session: Db, principal: SignedIn, after: After = "", limit: Limit = 1000) -> Tokens:
    """List the user's tokens."""
    page = accounts.page_of_api_tokens(session, principal.user, after=after, limit=limit)
    tokens = [TokenRow.model_validate(row) for (row,) in page.rows]
    return Tokens(tokens=tokens, total=page.total, next=page.next)


@router.post("", status_code=201)
@requires(ACCOUNT)
@audited("name", "kind", "project", "run_id", "days")
def make_token(
    body: Annotated[TokenName, in_project(TokenName, Permission.VIEW_RUN, is_invalid=True)],
    session: Db,
    principal: SignedIn,
    _at_browser: AtBrowser,
) -> NewToken:
    """Create a token. Requires a browser, since a stolen token could otherwise create others."""
    token, row = accounts.make_api_token(
        session,
        principal.user,
        body.name,
        body.kind,
        project=body.project,
        run_id=body.run_id,
        days=body.days,
    )
    return NewToken(**TokenRow.model_validate(row).model_dump(), token=token)


@router.delete("/{token_id}", status_code=204)
@requires(ACCOUNT)
def revoke_token(token_id: RowId, session: Db, principal: SignedIn) -> None:
    """Revoke one of the user's tokens."""
    name = accounts.delete_api_token(session, principal.user, token_id)
    audit.set_detail(session, f"name {name}" if name else "")
