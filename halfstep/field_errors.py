"""Messages for invalid fields, which name the allowed values."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

#: Limits of what is reported of one request or response: fields, and characters of each path,
#: message and of all together.
MOST_FIELDS, LONGEST_PATH, LONGEST_MESSAGE, LONGEST_SUMMARY = 20, 200, 1000, 4000
#: The key of a message that counts the fields beyond the limit.
FURTHER = "…"

#: By pydantic's type of an error, with the fields of its context.
ALLOWED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "{min_length} or more characters",
    "string_type": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "{min_length} or more entries",
}


def reason(error: Mapping[str, Any]) -> str:
    """Return what a field allows, or pydantic's message. error: of ValidationError.errors()."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    allowed = ALLOWED.get(error["type"])
    return f"allowed: {allowed.format(**error.get('ctx', {}))}" if allowed else str(error["msg"])


def bound(errors: Mapping[str, str]) -> dict[str, str]:
    """Return the messages of the first fields, cut to a length, and the number of the others."""
    # One more than the limit may be the number of the others, from an earlier call.
    is_cut = len(errors) > MOST_FIELDS + 1
    shown = islice(errors.items(), MOST_FIELDS if is_cut else None)
    kept = {cut(path, LONGEST_PATH): cut(text, LONGEST_MESSAGE) for path, text in shown}
    if is_cut:
        kept[FURTHER] = f"{len(errors) - MOST_FIELDS:,} more fields are not allowed"
    return kept


def summary(errors: Mapping[str, str]) -> str:
    """Return the messages as one text."""
    return cut("; ".join(f"{path}: {text}" for path, text in errors.items()), LONGEST_SUMMARY)


def of_pydantic(errors: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the messages by path. errors: of ValidationError.errors()."""
    return {".".join(map(str, error["loc"])): reason(error) for error in errors}


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
