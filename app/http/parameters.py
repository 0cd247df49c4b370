"""Parameters of requests: bounds of ids, and texts that can be stored."""

import re
from collections.abc import Iterable
from typing import Annotated, Any

from annotated_types import Interval
from fastapi import Request
from fastapi.dependencies.models import Dependant
from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from db.errors import Invalid
from db.tables import LARGEST_COUNT, LARGEST_ID

LARGEST_STEP = LARGEST_COUNT

RowId = Annotated[int, Interval(ge=1, le=LARGEST_ID)]
RunId = RowId
Step = Annotated[int, Interval(ge=1, le=LARGEST_STEP)]

#: What a configuration may hold, whatever its recipe says.
LARGEST_INTEGER = 2**63 - 1
TEXT_CHARACTERS = 10_000
DEPTH = 10
#: What is typed into a field: SQLite takes patterns of no more than 50,000 bytes.
TYPED_CHARACTERS = 1000
#: Of a setting or a metric by which to sort.
NAME_CHARACTERS = 200
API = "/api/v1/"
#: Of mistakes of one kind; as many as an address can hold are no help.
MOST_TOLD = 10


def flaw(text: str) -> str | None:
    """Return why a text cannot be stored: PostgreSQL takes no NUL, UTF-8 no lone surrogate."""
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            return f"{text[:100]!r} has the character {character!r}, which cannot be kept"
    return None


def flaws(value: Any, path: str = "") -> dict[str, str]:
    """Return the texts in a JSON value that cannot be stored, by path."""
    found = {}
    if isinstance(value, str) and (wrong := flaw(value)):
        found[path] = wrong
    elif isinstance(value, dict):
        for name, each in value.items():
            below = f"{path}.{name}" if path else name
            found |= {below: wrong} if (wrong := flaw(name)) else flaws(each, below)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            found |= flaws(each, f"{path}.{number}")
    return found


def outsized(value: Any, path: str = "config", depth: int = 0) -> dict[str, str]:
    """Return the values that are too large, too long or too deep, by path."""
    if depth > DEPTH:
        return {path: f"it is nested; allowed: at most {DEPTH} objects or lists within each other"}
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS:
        text = f"it has {len(value):,} characters; allowed: at most {TEXT_CHARACTERS:,}"
        return {path: text}
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        bounds = f"from {-LARGEST_INTEGER} to {LARGEST_INTEGER}"
        return {path: f"{str(value)[:100]} is not allowed; allowed: a whole number {bounds}"}
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    found: dict[str, str] = {}
    for name, each in inner:
        found |= outsized(each, f"{path}.{name}" if depth else str(name)[:100], depth + 1)
    return found


def check_known(request: Request) -> None:
    """Check that the API knows all query parameters. Raises Invalid."""
    if not request.query_params or not request.url.path.startswith(API):
        return
    known = _names(request.scope["route"].dependant)
    if unknown := [name for name in request.query_params if name not in known]:
        allowed = ", ".join(sorted(known)) or "nothing behind a ?"
        text = f"no parameter is called so; allowed: {allowed}"
        raise Invalid({name[:NAME_CHARACTERS]: text for name in unknown[:MOST_TOLD]})


def _names(asked: Dependant) -> set[str]:
    own = {each.alias for each in asked.query_params}
    return own.union(*map(_names, asked.dependencies))


def as_run_id(field: str, text: str) -> int:
    """Parse a run id of a form. Raises Invalid."""
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    if not 1 <= number <= LARGEST_ID:
        raise Invalid({field: f"{text[:100]!r} is not allowed; allowed: the number of a run"})
    return number


def as_run_ids(field: str, text: str, *, most: int) -> list[int]:
    """Parse comma-separated run ids, each once. Raises Invalid."""
    allowed = f"allowed: numbers of runs with commas between them, {most} at most"
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal())]
    ids = [] if wrong else list(dict.fromkeys(int(part[:12]) for part in parts))
    wrong += [str(number) for number in ids if not 1 <= number <= LARGEST_ID]
    if wrong:
        raise Invalid({field: f"{wrong[0][:100]!r} is not allowed; {allowed}"})
    if not ids:
        raise Invalid({field: f"it names none; {allowed}"})
    if len(ids) > most:
        raise Invalid({field: f"it names {len(ids):,} runs; {allowed}"})
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


class Body(BaseModel):
    """Base of request bodies; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


Text = Annotated[str, AfterValidator(_text)]
#: Of a column, a setting or a metric.
Name = Annotated[str, AfterValidator(_named)]
#: What runs are listed by: such a name; with "-" before it, downwards.
Sort = Name
