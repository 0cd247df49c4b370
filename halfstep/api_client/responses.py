"""Responses of the server, and errors if it rejects a request or does not respond."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import httpx2

from halfstep import field_errors, protocol
from halfstep.api_client.errors import ApiError, DamagedData
from halfstep.telemetry.plain_json import is_unicode


def is_away(error: ApiError) -> bool:
    """Return whether the request may succeed later: the server or its proxy is unavailable."""
    return error.status in (502, 503, 504) or isinstance(error.__cause__, httpx2.TransportError)


def check_body(value: Any, path: str = "") -> None:
    """Raise ApiError for a number or text that JSON lacks, with its path in the request body."""
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(path, f"{value} is not valid; allowed: a finite number")
    if isinstance(value, str) and not is_unicode(value):
        _refuse(path, f"{ascii(value)[:200]} is not valid; allowed: text without lone surrogates")
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, item in inner:
        check_body(name, path)
        check_body(item, f"{path}.{name}" if path else str(name))


def _refuse(path: str, text: str) -> NoReturn:
    raise ApiError(0, f"{path}: {text}" if path else text, {path: text})


def naming(origin: str) -> dict[str, list[Callable[[httpx2.Response], None]]]:
    """Return hooks for a connection: errors of status 401 get the token's origin.

    It is noted whether the server is older than this client, and warned of damaged data.
    """

    def note_version(answer: httpx2.Response) -> None:
        header = answer.headers.get(protocol.HEADER)
        protocol.LastServer.is_older = protocol.is_older(header)

    def warn_of_damage(answer: httpx2.Response) -> None:
        if text := answer.headers.get(protocol.DAMAGED):
            warnings.warn(text, DamagedData, stacklevel=2)

    def add_origin(answer: httpx2.Response) -> None:
        if answer.status_code == 401 and origin:
            answer.read()
            error = error_of(answer)
            text = f"{error} The token is that of {origin}."
            raise ApiError(401, text, error.errors, error.problem)

    return {"response": [note_version, warn_of_damage, add_origin]}


@contextmanager
def spoken() -> Iterator[None]:
    """Convert connection errors and malformed responses to ApiError."""
    try:
        yield
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        reason, url = str(error) or type(error).__name__, error.request.url
        address = f"{url.scheme}://{url.netloc.decode()}"  # without a password in the URL
        raise ApiError(0, f"the server does not answer at {address}: {reason}") from error
    except httpx2.InvalidURL as error:
        raise ApiError(0, f"the request cannot be sent: {error}") from error
    except UnicodeEncodeError as error:  # in an address; bodies are checked before
        _refuse("", f"{ascii(error.object)[:200]} is not valid; allowed: text that is Unicode")
    except (KeyError, TypeError) as error:
        raise ApiError(
            0, f"the response is not from a Halfstep server: there is no {error}"
        ) from error


def content(answer: httpx2.Response) -> Any:
    """Return the decoded body. Raises ApiError for an error status or a body that is not JSON."""
    if answer.is_error:
        raise error_of(answer)
    try:
        return answer.json()
    except ValueError as error:
        raise ApiError(0, f"{answer.url} answers what is no JSON: no server of ours?") from error


def error_of(answer: httpx2.Response) -> ApiError:
    """Return the ApiError for an error response."""
    try:
        body = answer.json()
    except ValueError:  # not a Halfstep server, or an HTML page
        body = None
    is_unknown_route = not isinstance(body, dict) or body.get("detail") == answer.reason_phrase
    if answer.status_code == 404 and is_unknown_route:  # ours name what is missing
        address = answer.url.copy_with(query=None)
        message = f"{address} is not an address of a Halfstep server: 404 Not Found"
        if isinstance(body, dict) and protocol.is_older(answer.headers.get(protocol.HEADER)):
            message = f"{message}. {protocol.OLDER_SERVER}"
        return ApiError(404, message)
    if not isinstance(body, dict):
        return ApiError(answer.status_code, f"{answer.status_code} {answer.reason_phrase}")
    errors = field_errors.bound(body.get("errors") or {})
    message = field_errors.summary(errors) or str(body.get("detail", answer.reason_phrase))
    if answer.status_code == 405 and protocol.is_older(answer.headers.get(protocol.HEADER)):
        message = f"{message} {protocol.OLDER_SERVER}"
    return ApiError(answer.status_code, message, errors, body)
