"""What addresses, forms and submissions may hold: the bounds of ids, and texts that can be kept."""

from typing import Annotated

from annotated_types import Interval
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from db.tables import Status

LARGEST_ID = 2**31 - 1
LARGEST_STEP = 2**62

RowId = Annotated[int, Interval(ge=1, le=LARGEST_ID)]
RunId = RowId
Step = Annotated[int, Interval(ge=1, le=LARGEST_STEP)]

STATUSES = ("active", *Status)


def flaw(text: str) -> str | None:
    """Say what keeps a text from being stored: PostgreSQL takes no NUL, UTF-8 no lone surrogate."""
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            return f"{text[:100]!r} has the character {character!r}, which cannot be kept"
    return None


def _text(text: str) -> str:
    if flaw(text):
        raise PydanticCustomError("text", "allowed: text without NUL and lone surrogates")
    return text


def _status(text: str) -> str:
    if text and text not in STATUSES:
        raise PydanticCustomError(
            "status", "allowed: {allowed}", {"allowed": ", ".join(map(str, STATUSES))}
        )
    return text


Text = Annotated[str, AfterValidator(_text)]
#: A status, "active", or empty for any.
StatusFilter = Annotated[str, AfterValidator(_status)]
