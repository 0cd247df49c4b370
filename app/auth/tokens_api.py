"""Your API tokens."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AtBrowser, SignedIn
from app.auth.permissions import ACCOUNT, requires
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from db.access import accounts

router = APIRouter(prefix="/tokens", tags=["tokens"])


class TokenName(Body):
    """What a token is for, what it may do, where and for how long."""

    name: Text
    kind: Annotated[
        Literal["full", "read", "submit", "control", "write", "run"],
        Field(
            description="full: all that you may. read: view and download. submit: read, and submit "
            "runs. control: submit, and control runs. write: send watched runs only. run: send one "
            "watched run only."
        ),
    ] = "full"
    project: Annotated[Text | None, Field(description="The only one it opens; null: all")] = None
    run_id: Annotated[RowId | None, Field(description="Of kind run: the one that it sends")] = None
    days: Annotated[int | None, Field(description="How long it lasts; null: for ever")] = (
        accounts.TOKEN_DAYS
    )


class TokenRow(BaseModel):
    """A token; its secret is not kept."""

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
    """A token just made."""

    token: Annotated[str, Field(description="The secret. It is not shown again.")]


class Tokens(ListPage):
    """Tokens, newest first."""

    tokens: list[TokenRow]


@router.get("")
@requires(ACCOUNT)
def list_tokens(session: Db, principal: SignedIn, after: After = "", limit: Limit = 1000) -> Tokens:
    """List your tokens."""
    found = accounts.page_of_api_tokens(session, principal.user, after=after, limit=limit)
    tokens = [TokenRow.model_validate(row) for (row,) in found.rows]
    return Tokens(tokens=tokens, total=found.total, next=found.next)


@router.post("", status_code=201)
@requires(ACCOUNT)
@audited("name", "kind", "project", "run_id", "days")
def make_token(
    wanted: TokenName, session: Db, principal: SignedIn, _at_browser: AtBrowser
) -> NewToken:
    """Make a token. Only a browser may: a token that could make others could not be revoked."""
    token, row = accounts.make_api_token(
        session,
        principal.user,
        wanted.name,
        wanted.kind,
        project=wanted.project,
        run_id=wanted.run_id,
        days=wanted.days,
    )
    return NewToken(**TokenRow.model_validate(row).model_dump(), token=token)


@router.delete("/{token_id}", status_code=204)
@requires(ACCOUNT)
def revoke_token(token_id: RowId, session: Db, principal: SignedIn) -> None:
    """Revoke one of your tokens."""
    name = accounts.delete_api_token(session, principal.user, token_id)
    audit.tell(session, f"name {name}" if name else "")
