"""Responses of the server, and errors when it refuses or does not respond."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from halfstep.api_client.errors import ApiError


def is_away(error: ApiError) -> bool:
    """Tell whether a server, or what stands before it, may answer a little later."""
    return error.status in (502, 503, 504) or isinstance(error.__cause__, httpx2.TransportError)


def check_finite(value: Any, path: str = "") -> None:
    """Raise ApiError for a number that JSON lacks, by its path in what is to be sent."""
    if isinstance(value, float) and not math.isfinite(value):
        errors = {path: f"{value} is not allowed; allowed: a finite number"}
        raise ApiError(0, f"{path}: {errors[path]}", errors)
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, each in inner:
        check_finite(each, f"{path}.{name}" if path else str(name))


def naming(origin: str) -> dict[str, list[Callable[[httpx2.Response], None]]]:
    """Return hooks of a connection: that a token is refused is told with where the token stands."""

    def hear(answer: httpx2.Response) -> None:
        if answer.status_code == 401 and origin:
            answer.read()
            error = refusal(answer)
            text = f"{error} The token is that of {origin}."
            raise ApiError(401, text, error.errors, error.problem)

    return {"response": [hear]}


@contextmanager
def spoken() -> Iterator[None]:
    """Make what goes wrong on the way an ApiError."""
    try:
        yield
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        reason, url = str(error) or type(error).__name__, error.request.url
        address = f"{url.scheme}://{url.netloc.decode()}"  # without a password that it may have
        raise ApiError(0, f"the server does not answer at {address}: {reason}") from error
    except httpx2.InvalidURL as error:
        raise ApiError(0, f"the server cannot be asked: {error}") from error
    except (KeyError, TypeError) as error:
        raise ApiError(0, f"the server answers nothing of ours: there is no {error}") from error


def content(answer: httpx2.Response) -> Any:
    """Return what an answer holds. Raises ApiError if it is a refusal, or not from our server."""
    if answer.is_error:
        raise refusal(answer)
    try:
        return answer.json()
    except ValueError as error:
        raise ApiError(0, f"{answer.url} answers what is no JSON: no server of ours?") from error


def refusal(answer: httpx2.Response) -> ApiError:
    """Return the error that an answer tells of."""
    try:
        said = answer.json()
    except ValueError:  # no server of ours, or a page
        said = None
    leads_nowhere = not isinstance(said, dict) or said.get("detail") == answer.reason_phrase
    if answer.status_code == 404 and leads_nowhere:  # ours says what is not there
        address = answer.url.copy_with(query=None)
        return ApiError(404, f"{address} is no address of a Halfstep: 404 Not Found")
    if not isinstance(said, dict):
        return ApiError(answer.status_code, f"{answer.status_code} {answer.reason_phrase}")
    errors = said.get("errors") or {}
    sentences = [f"{field}: {text}" for field, text in errors.items()]
    message = "; ".join(sentences) or str(said.get("detail", answer.reason_phrase))
    return ApiError(answer.status_code, message, errors, said)
