"""Errors as HTTP responses: the table of status codes."""

import logging
import re
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, Field
from sqlalchemy.exc import DBAPIError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth.authentication import (
    CsrfError,
    LinkNeeded,
    NoPasswords,
    NotForScripts,
    NotForSending,
    SignInNeeded,
    UnknownToken,
    WriteOnly,
    who_asked,
)
from app.auth.permissions import Forbidden
from app.auth.sso import SsoFailed
from app.html.rendering import page
from app.http.active_requests import AccessRevoked, TooManyAtOnce
from app.runs.filters import BadFilter
from db import errors
from db.access import secrets
from db.access.login_attempts import TooManyAttempts
from db.database import is_outage

logger = logging.getLogger(__name__)

STATUS_CODES: dict[type[Exception], int] = {
    SignInNeeded: 401,
    UnknownToken: 401,
    LinkNeeded: 401,
    AccessRevoked: 401,
    errors.InvalidCredentials: 401,
    CsrfError: 403,
    NotForScripts: 403,
    WriteOnly: 403,
    NoPasswords: 403,
    SsoFailed: 502,
    NotForSending: 403,
    Forbidden: 403,
    errors.NotOwner: 403,
    errors.NotFound: 404,
    errors.InTrash: 404,
    errors.Conflict: 409,
    errors.Changed: 409,
    errors.StaleAttempt: 409,
    errors.Ended: 409,
    errors.OffsetMismatch: 409,
    errors.OverQuota: 409,
    errors.Invalid: 422,
    BadFilter: 422,
    TooManyAttempts: 429,
    TooManyAtOnce: 429,
    secrets.Unreadable: 500,
    errors.DatabaseUnreachable: 503,
    errors.StorageUnreachable: 503,
    errors.StorageFull: 507,
}
#: What pydantic says for those who program; of these more for those who type.
IN_WORDS = {
    "int_parsing": "allowed: a whole number",
    "int_type": "allowed: a whole number",
    "float_parsing": "allowed: a number",
    "float_type": "allowed: a number",
    "string_type": "allowed: a text",
    "extra_forbidden": "no field is called so",
}
PROBLEM_TYPE = "application/problem+json"
FAILED = "The server failed at this. What it says of it is in its log."


class Problem(BaseModel):
    """A problem (RFC 9457), with a code for programs and the invalid fields."""

    type: str = "about:blank"
    title: Annotated[str, Field(description="The status in words")]
    status: int
    detail: Annotated[str, Field(description="The reason, for people")]
    code: Annotated[str, Field(description="The reason, for programs: not_found, invalid, …")]
    errors: Annotated[
        dict[str, str] | None, Field(description="By path of each bad field, what is allowed")
    ] = None
    words: Annotated[
        list[int] | None, Field(description="Of a filter, those that are wrong, from 1")
    ] = None
    sequence: Annotated[int | None, Field(description="Of a spool, the file to go on with")] = None
    offset: Annotated[int | None, Field(description="Of what is sent, where to go on")] = None


class Failures:
    """Turns an unexpected error into a response with all headers, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception:
            if has_started or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            request = Request(scope)
            response = await run_in_threadpool(_answer, request, 500, FAILED, "failed")
            await response(scope, receive, send)


def install(app: FastAPI) -> None:
    """Register the error handlers."""
    app.add_exception_handler(errors.HalfstepError, _on_halfstep_error)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(DBAPIError, _on_database_error)


def _on_halfstep_error(request: Request, error: Exception) -> Response:
    if isinstance(error, SignInNeeded) and not _wants_json(request) and request.method == "GET":
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/sign-in?next={quote(address)}", status_code=303)
    if isinstance(error, errors.DatabaseUnreachable):
        return _without_database(request, error)
    fields = error.errors if isinstance(error, errors.Invalid) else None
    status = STATUS_CODES.get(type(error), 500)
    place: dict[str, Any] = {}
    if isinstance(error, BadFilter):
        place = {"words": [mistake.number for mistake in error.mistakes]}
    if isinstance(error, errors.OffsetMismatch):
        place = {"sequence": error.sequence, "offset": error.offset}
    links = {"/trash": "Open trash"} if isinstance(error, errors.InTrash) else {}
    answer = _answer(request, status, str(error), _code(type(error)), fields, place, links)
    if isinstance(error, TooManyAttempts | TooManyAtOnce):
        answer.headers["Retry-After"] = str(error.seconds)
    return answer


def _code(kind: type[Exception]) -> str:
    """Return the code of an error: NotFound is not_found."""
    return getattr(kind, "code", "") or re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - what it is registered for
    wrong = [each for each in error.errors() if each["loc"][0] == "path"]
    if wrong and not _wants_json(request):  # an address that leads nowhere
        what = str(wrong[0]["loc"][1]).removesuffix("_id")
        text = f"There is no {what} {str(wrong[0]['input'])[:100]!r}."
        return _answer(request, 404, text, _code(errors.NotFound))
    fields = dict(map(_flaw, error.errors()))
    message = "; ".join(f"{k}: {v}" for k, v in fields.items())
    return _answer(request, 422, message, "invalid", fields)


def _flaw(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the invalid field and the reason."""
    if found["type"] == "json_invalid":  # where it is told is a character's place, no field
        return "body", f"it is no JSON: {found['ctx']['error']}, at character {found['loc'][-1]}"
    field = ".".join(map(str, found["loc"][1:])) or "body"
    if found["type"] == "missing":  # what lacks it is no value of its own
        return field, "it is missing"
    return field, f"{found['input']!r:.200}: {IN_WORDS.get(found['type'], found['msg'])}"


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    code = HTTPStatus(error.status_code).name.lower()
    response = _answer(request, error.status_code, str(error.detail), code)
    response.headers.update(error.headers or {})
    return response


def _on_database_error(request: Request, error: Exception) -> Response:
    if not is_outage(error):
        raise error
    assert isinstance(error, DBAPIError)  # noqa: S101 - what it is registered for
    return _without_database(request, error.orig)


def _without_database(request: Request, error: BaseException | None) -> Response:
    # Address and error of the database are for operators, not for clients.
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        text = "The disk that holds the database is full. Nothing was changed; free space on it."
        return _answer(request, 507, text, _code(errors.StorageFull))
    text = "The database does not answer. Nothing was changed; try again."
    return _answer(request, 503, text, _code(errors.DatabaseUnreachable))


def _answer(
    request: Request,
    status: int,
    message: str,
    code: str,
    fields: dict[str, str] | None = None,
    place: Mapping[str, Any] = MappingProxyType({}),
    links: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return a problem or an error page. links: of the page, in addition to the runs."""
    message, title = _encodable(message), HTTPStatus(status).phrase
    if _wants_json(request):
        named = {_encodable(k): _encodable(v) for k, v in fields.items()} if fields else None
        said = {"title": title, "status": status, "detail": message, "code": code}
        problem = Problem.model_validate({**said, "errors": named, **place})
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        content = problem.model_dump(exclude_none=True)
        return JSONResponse(content, status, headers, media_type=PROBLEM_TYPE)
    principal = who_asked(request) if status != 503 else None
    said = {"title": title, "message": message, "links": links}
    return page(request, "base/error.html", principal=principal, status_code=status, **said)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def _wants_json(request: Request) -> bool:
    """Return whether the client is a program: it sends a token or uses the API."""
    if "authorization" in request.headers:
        return True
    return request.url.path.startswith("/api/") and request.url.path != "/api/v1/docs"
