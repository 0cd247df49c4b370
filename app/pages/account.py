"""Your password and API tokens."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth import SignedIn, Visitor, sign_in
from app.context import Db
from app.parameters import RowId, Text
from app.rendering import page
from db import accounts
from db.errors import Invalid
from db.tables import User

router = APIRouter(prefix="/account")


@router.get("")
def show_account(request: Request, session: Db, visitor: SignedIn) -> HTMLResponse:
    """Show them."""
    return _account(request, session, visitor)


@router.post("/password")
def set_password(
    request: Request, session: Db, visitor: SignedIn, password: Annotated[str, Form()] = ""
) -> Response:
    """Set a password; every other browser is signed out."""
    user = session.get_one(User, visitor.user.id)
    try:
        accounts.set_password(session, user, password)
    except Invalid as error:
        return _account(request, session, visitor, errors=error.errors)
    response = RedirectResponse("/account", status_code=303)
    sign_in(request, response, session, user)
    return response


@router.post("/tokens")
def make_token(
    request: Request, session: Db, visitor: SignedIn, name: Annotated[Text, Form()] = ""
) -> HTMLResponse:
    """Make a token and show it, this once."""
    try:
        token, _row = accounts.make_api_token(session, visitor.user, name)
    except Invalid as error:
        return _account(request, session, visitor, errors=error.errors)
    return _account(request, session, visitor, token=token)


@router.post("/tokens/{token_id}/revocation")
def revoke_token(token_id: RowId, session: Db, visitor: SignedIn) -> RedirectResponse:
    """Revoke a token."""
    accounts.delete_api_token(session, visitor.user, token_id)
    return RedirectResponse("/account", status_code=303)


def _account(
    request: Request,
    session: Session,
    visitor: Visitor,
    *,
    token: str = "",
    errors: dict[str, str] | None = None,
) -> HTMLResponse:
    return page(
        request,
        "account.html",
        visitor=visitor,
        status_code=422 if errors else 200,
        tokens=accounts.api_tokens(session, visitor.user),
        token=token,
        errors=errors or {},
    )
