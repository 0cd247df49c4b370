"""Request parameters: bounds of ids, and validation of texts."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any

from annotated_types import Interval
from fastapi import Form, Request
from fastapi.dependencies.models import Dependant
from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from db.errors import Invalid
from db.tables import LARGEST_COUNT, LARGEST_ID

LARGEST_STEP = LARGEST_COUNT

RowId = Annotated[int, Interval(ge=1, le=LARGEST_ID)]
RunId = RowId
Step = Annotated[int, Interval(ge=1, le=LARGEST_STEP)]

#: Limits of a configuration, independent of its recipe.
LARGEST_INTEGER = 2**63 - 1
TEXT_CHARACTERS = 10_000
DEPTH = 10
#: Length limit of text fields: SQLite accepts patterns of at most 50,000 bytes.
TYPED_CHARACTERS = 1000
#: Length limit of names of settings and metrics.
NAME_CHARACTERS = 200
API = "/api/v1/"
#: Limit of reported mistakes of one kind.
MOST_REPORTED = 10


def flaw(text: str) -> str | None:
    """Return why a text cannot be stored: NUL in PostgreSQL, or lone surrogates in UTF-8."""
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            return f"{text[:100]!r} has the character {character!r}, which cannot be stored"
    return None


def flaws(value: object, path: str = "") -> dict[str, str]:
    """Return the texts in a JSON value that cannot be stored, by path."""
    result = {}
    if isinstance(value, str) and (wrong := flaw(value)):
        result[path] = wrong
    elif isinstance(value, dict):
        for name, item in value.items():
            below = f"{path}.{name}" if path else name
            result |= {below: wrong} if (wrong := flaw(name)) else flaws(item, below)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            result |= flaws(item, f"{path}.{number}")
    return result


def nonfinite(value: object, path: str = "") -> dict[str, str]:
    """Return the numbers in a JSON value that JSON cannot express, by path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = (nonfinite(item, f"{path}.{name}" if path else str(name)) for name, item in items)
        return {below: wrong for part in inner for below, wrong in part.items()}
    is_wrong = isinstance(value, float) and not math.isfinite(value)
    return {path: f"{value} is not valid; allowed: finite numbers"} if is_wrong else {}


def find_outsized(value: object, path: str = "config", depth: int = 0) -> dict[str, str]:
    """Return the values that are too large, too long or too deep, by path."""
    if depth > DEPTH:
        return {path: f"it is nested; allowed: at most {DEPTH} objects or lists within each other"}
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS:
        text = f"it has {len(value):,} characters; allowed: at most {TEXT_CHARACTERS:,}"
        return {path: text}
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        bounds = f"from {-LARGEST_INTEGER} to {LARGEST_INTEGER}"
        return {path: f"{str(value)[:100]} is not valid; allowed: a whole number {bounds}"}
    inner: Iterable[tuple[Any, object]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    result: dict[str, str] = {}
    for name, item in inner:
        result |= find_outsized(item, f"{path}.{name}" if depth else str(name)[:100], depth + 1)
    return result


def check_known(request: Request) -> None:
    """Check that the API knows all query parameters. Raises Invalid."""
    if not request.query_params or not request.url.path.startswith(API):
        return
    known = _names(request.scope["route"].dependant)
    if unknown := [name for name in request.query_params if name not in known]:
        allowed = ", ".join(sorted(known)) or "no query parameters"
        text = f"unknown parameter; allowed: {allowed}"
        raise Invalid({name[:NAME_CHARACTERS]: text for name in unknown[:MOST_REPORTED]})


def _names(dependant: Dependant) -> set[str]:
    own = {parameter.alias for parameter in dependant.query_params}
    return own.union(*map(_names, dependant.dependencies))


def as_run_id(field: str, text: str) -> int:
    """Parse a run id of a form. Raises Invalid."""
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    if not 1 <= number <= LARGEST_ID:
        raise Invalid({field: f"{text[:100]!r} is not valid; allowed: a run id"})
    return number


def as_run_ids(field: str, text: str, *, most: int) -> list[int]:
    """Parse comma-separated run ids, each once. Raises Invalid."""
    allowed = f"allowed: comma-separated run ids, at most {most}"
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal())]
    ids = [] if wrong else list(dict.fromkeys(int(part[:12]) for part in parts))
    wrong += [str(number) for number in ids if not 1 <= number <= LARGEST_ID]
    if wrong:
        raise Invalid({field: f"{wrong[0][:100]!r} is not valid; {allowed}"})
    if not ids:
        raise Invalid({field: f"no run is given; {allowed}"})
    if len(ids) > most:
        raise Invalid({field: f"{len(ids):,} runs are given; {allowed}"})
    return ids


def _text(text: str) -> str:
    if flaw(text):
        raise PydanticCustomError("text", "allowed: text without NUL and lone surrogates")
    if len(text) > TYPED_CHARACTERS:
        raise PydanticCustomError(
            "text", "allowed: at most {most} characters", {"most": TYPED_CHARACTERS}
        )
    return text


def _named(text: str) -> str:
    if len(_text(text)) > NAME_CHARACTERS:
        raise PydanticCustomError(
            "name", "allowed: at most {most} characters", {"most": NAME_CHARACTERS}
        )
    return text


class DocumentedModel(BaseModel):
    """Base of models: the text below a field is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Body(DocumentedModel):
    """Base of request bodies; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


Text = Annotated[str, AfterValidator(_text)]
#: The same in a field of a form.
FormText = Annotated[Text, Form()]
#: Name of a column, a setting or a metric.
Name = Annotated[str, AfterValidator(_named)]
#: Sort key of runs: such a name, descending with a "-" prefix.
Sort = Name
