"""Errors of the database layer as answers: the one table of status codes."""

import logging
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from app.auth import Forgery, NotForScripts, SignInNeeded
from app.brake import TooManyTries
from app.rendering import page
from db import errors
from db.database import is_outage

logger = logging.getLogger(__name__)

STATUS_CODES: dict[type[Exception], int] = {
    SignInNeeded: 401,
    errors.Refused: 401,
    Forgery: 403,
    NotForScripts: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Fenced: 409,
    errors.Invalid: 422,
    TooManyTries: 429,
    errors.DatabaseUnreachable: 503,
}


def install(app: FastAPI) -> None:
    """Make the app answer with these."""
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
    return _answer(request, STATUS_CODES.get(type(error), 500), str(error), fields)


def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - what it is registered for
    fields = {
        ".".join(map(str, each["loc"][1:])) or "body": f"{each['input']!r}: {each['msg']}"
        for each in error.errors()
    }
    return _answer(request, 422, "; ".join(f"{k}: {v}" for k, v in fields.items()), fields)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    response = _answer(request, error.status_code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


def _on_database_error(request: Request, error: Exception) -> Response:
    if not is_outage(error):
        raise error
    assert isinstance(error, DBAPIError)  # noqa: S101 - what it is registered for
    return _without_database(request, error.orig)


def _without_database(request: Request, error: BaseException | None) -> Response:
    # Where the database is and why it is silent is for the operator, not for strangers.
    logger.warning("%s %s: %s", request.method, request.url.path, error)
    return _answer(request, 503, "The database does not answer. Nothing was changed; try again.")


def _answer(
    request: Request, status: int, message: str, fields: dict[str, str] | None = None
) -> Response:
    message = _encodable(message)
    if _wants_json(request):
        content = (
            {"errors": {_encodable(k): _encodable(v) for k, v in fields.items()}}
            if fields
            else {"detail": message}
        )
        return JSONResponse(content, status_code=status)
    title = HTTPStatus(status).phrase
    return page(request, "error.html", status_code=status, title=title, message=message)


def _encodable(text: str) -> str:
    """Spell out lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def _wants_json(request: Request) -> bool:
    return request.url.path.startswith("/api/") and request.url.path != "/api/docs"
