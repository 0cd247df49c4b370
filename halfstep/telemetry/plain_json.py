"""JSON that every database and browser represents: conversion, and texts for messages."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

#: A JSON object whose fields are not ours to name: a user's configuration, a JSON Schema.
JsonObject: TypeAlias = dict[str, Any]

#: Largest integer that a float, and thus JavaScript, represents exactly.
LARGEST_WHOLE = 2**53
DEPTH = 20  # nested lists and objects
#: Floats that JSON lacks, as texts.
NONFINITE = ("NaN", "Infinity", "-Infinity")
CLEAN = "text without NUL and lone surrogates"
SURROGATE = re.compile("[\ud800-\udfff]")
ENCODER = json.JSONEncoder(allow_nan=False)  # shared: json.dumps creates one for each call


def json_safe(value: Any) -> Any:
    """Return the value with every non-finite float as "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """Return json_safe(value) with texts that UTF-8 and every database can store.

    File names need not be UTF-8: Python represents their other bytes as lone surrogates.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return json_safe(value)


def unplain(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Return where a value is not JSON that every database and browser can represent; else None."""
    if depth > DEPTH:
        return f"{path} is nested; allowed: at most {DEPTH} lists or objects within each other"
    if isinstance(value, dict):
        if unclean := [name for name in value if not (isinstance(name, str) and is_clean(name))]:
            return f"a field is named {safe_repr(unclean[0])}; allowed: {CLEAN}"
        below = f"{path}." if path else ""
        return _first(unplain(item, f"{below}{name}", depth + 1) for name, item in value.items())
    if isinstance(value, list | tuple):
        return _first(unplain(item, path, depth + 1) for item in value)
    if isinstance(value, str):
        return None if is_clean(value) else f"{path} is {safe_repr(value)}; allowed: {CLEAN}"
    if value is None or isinstance(value, float | bool):
        return None
    if isinstance(value, int) and -LARGEST_WHOLE <= value <= LARGEST_WHOLE:
        return None
    allowed = f"a whole number from {-LARGEST_WHOLE} to {LARGEST_WHOLE}"
    return f"{path} is {safe_repr(value)}; allowed: {allowed}"


def safe_repr(value: Any) -> str:
    """Return the repr of a value for a message, at most 200 characters; does not raise."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, a list too deep, a user's class
        text = f"of type {type(value).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:200]}…"


def clean(text: str) -> str:
    """Escape NUL and lone surrogates, which databases or UTF-8 cannot store."""
    text = text if text.isascii() else text.encode(errors="backslashreplace").decode()
    return text.replace("\0", "\\x00")


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def is_clean(text: str) -> bool:
    """Return whether UTF-8 and every database can store a text."""
    return "\0" not in text and is_unicode(text)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text: Python keeps other bytes as lone surrogates."""
    return text.isascii() or not SURROGATE.search(text)
