"""Errors as HTTP responses: the table of status codes."""

import logging
import re
import sqlite3
from collections.abc import Collection, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import Field
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
    principal_of,
)
from app.auth.permissions import Forbidden
from app.auth.sso import SsoFailed
from app.html.rendering import page
from app.http.active_requests import AccessRevoked, TooManyAtOnce
from app.http.parameters import DocumentedModel
from app.http.rate_limit import RateLimited
from app.runs.filters import BadFilter
from db import errors
from db.access import secrets
from db.access.login_attempts import TooManyAttempts
from db.database import is_outage
from halfstep import field_errors
from halfstep.suggestions import did_you_mean

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
    RateLimited: 429,
    secrets.Unreadable: 500,
    errors.StepsMissing: 500,
    errors.StepsUnreadable: 500,
    errors.StepsNotConverted: 503,
    errors.DatabaseUnreachable: 503,
    errors.StorageUnreachable: 503,
    errors.StorageFull: 507,
}
PROBLEM_TYPE = "application/problem+json"
FAILED = "An error occurred on the server. Its log has the details."


class Problem(DocumentedModel):
    """A problem (RFC 9457), with a code for programs and the invalid fields."""

    type: str = "about:blank"
    title: Annotated[str, Field(description="Phrase of the status")]
    status: int
    detail: Annotated[str, Field(description="Error message")]
    code: Annotated[str, Field(description="Error code: not_found, invalid, …")]
    errors: dict[str, str] | None = None
    """Messages by path of the invalid fields"""
    words: list[int] | None = None
    """Numbers of the invalid terms of a filter, from 1"""
    sequence: int | None = None
    """For a spool: the file to continue from"""
    offset: int | None = None
    """For an upload: the offset to continue from"""


class Failures:
    """Middleware that turns unexpected errors into responses with all headers, and logs them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        has_started = False

        async def send_and_track(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_track)
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
    details: dict[str, object] = {}
    if isinstance(error, BadFilter):
        details = {"words": [mistake.number for mistake in error.mistakes]}
    if isinstance(error, errors.OffsetMismatch):
        details = {"sequence": error.sequence, "offset": error.offset}
    links = {"/trash": "Open trash"} if isinstance(error, errors.InTrash) else {}
    response = _answer(request, status, str(error), _code(type(error)), fields, details, links)
    if isinstance(error, TooManyAttempts | TooManyAtOnce | RateLimited):
        response.headers["Retry-After"] = str(error.seconds)
    return response


def _code(kind: type[Exception]) -> str:
    """Return the code of an error: NotFound is not_found."""
    return getattr(kind, "code", "") or re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - what it is registered for
    wrong = [flaw for flaw in error.errors() if flaw["loc"][0] == "path"]
    if wrong and not _wants_json(request):  # a page that does not exist
        noun = str(wrong[0]["loc"][1]).removesuffix("_id")
        text = f"There is no {noun} {str(wrong[0]['input'])[:100]!r}."
        return _answer(request, 404, text, _code(errors.NotFound))
    body = getattr(request.scope["route"], "body_field", None)
    known = getattr(body and body.field_info.annotation, "model_fields", {})
    invalid = errors.Invalid(dict(_flaw(flaw, known) for flaw in error.errors()))
    return _answer(request, 422, str(invalid), "invalid", invalid.errors)


def _flaw(error: Mapping[str, Any], known: Collection[str]) -> tuple[str, str]:
    """Return the invalid field and the reason. known: fields of the body."""
    if error["type"] == "json_invalid":  # its location is a character's index, not a field
        return "body", f"invalid JSON: {error['ctx']['error']}, at character {error['loc'][-1]}"
    field = ".".join(map(str, error["loc"][1:])) or "body"
    if field == "body" and isinstance(error.get("input"), bytes):
        return field, "it is not read as JSON; send the header Content-Type: application/json"
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 2 and known:
        meant = did_you_mean(field, known)
        return field, f"unknown field; {meant}allowed: {', '.join(known)}"
    if error["type"] == "missing":  # its input is the enclosing object
        return field, "it is missing"
    return field, f"{error['input']!r:.200}: {field_errors.reason(error)}"


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    status, text = HTTPStatus(error.status_code), str(error.detail)
    is_unknown = status is HTTPStatus.NOT_FOUND and text == status.phrase
    if is_unknown and not _wants_json(request):  # clients recognise it by this detail
        text = f"There is no page {request.url.path[:100]}."
    response = _answer(request, status, text, status.name.lower())
    response.headers.update(error.headers or {})
    return response


def _on_database_error(request: Request, error: Exception) -> Response:
    if not is_outage(error):
        raise error
    assert isinstance(error, DBAPIError)  # noqa: S101 - what it is registered for
    return _without_database(request, error.orig)


def _without_database(request: Request, error: BaseException | None) -> Response:
    # Address and error of the database are only logged, not sent to clients.
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        text = "The disk of the database is full. Nothing was changed; free space on it."
        return _answer(request, 507, text, _code(errors.StorageFull))
    text = "The database does not answer. Nothing was changed; try again."
    return _answer(request, 503, text, _code(errors.DatabaseUnreachable))


def _answer(
    request: Request,
    status: int,
    message: str,
    code: str,
    fields: dict[str, str] | None = None,
    details: Mapping[str, object] = MappingProxyType({}),
    links: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return a problem or an error page.

    details: additional fields of the problem.  links: of the page, in addition to the runs.
    """
    message = _encodable(field_errors.cut(message, field_errors.LONGEST_SUMMARY))
    title = HTTPStatus(status).phrase
    if _wants_json(request):
        named = {_encodable(k): _encodable(v) for k, v in fields.items()} if fields else None
        fixed = {"title": title, "status": status, "detail": message, "code": code}
        problem = Problem.model_validate({**fixed, "errors": named, **details})
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        content = problem.model_dump(exclude_none=True)
        return JSONResponse(content, status, headers, media_type=PROBLEM_TYPE)
    principal = principal_of(request) if status != 503 else None
    heading = "No access" if status in (401, 403) else title
    content = {"title": heading, "message": message, "links": links}
    return page(request, "base/error.html", principal=principal, status_code=status, **content)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def _wants_json(request: Request) -> bool:
    """Return whether the client is a program: it sends a token or uses the API."""
    if "authorization" in request.headers:
        return True
    return request.url.path.startswith("/api/") and request.url.path != "/api/v1/docs"
