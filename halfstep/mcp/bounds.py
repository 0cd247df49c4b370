"""Bounds of a tool's result, which fills the context of a model."""

import json
import math
import unicodedata
from typing import Any

from halfstep.telemetry.plain_json import JsonObject

#: About 6,000 tokens.
MOST_CHARACTERS = 24_000
LONGEST_TEXT = 2000
LEFT_OUT = "left_out"
#: Unicode categories of characters that a person does not see and a model reads.
UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs")


def bound(result: JsonObject) -> JsonObject:
    """Return a result of at most MOST_CHARACTERS as JSON.

    The longest lists are halved first; `left_out` has the number of their items that are missing.
    """
    small: JsonObject = _short(result)
    left_out: dict[str, int] = {}
    while len(json.dumps(small)) > MOST_CHARACTERS:
        path, items = max(
            _lists(small), key=lambda entry: len(json.dumps(entry[1])), default=("", [])
        )
        if not items:
            return {LEFT_OUT: "the result is too large: request less"}
        missing = (len(items) + 1) // 2
        left_out[path] = left_out.get(path, 0) + missing
        del items[-missing:]
        small[LEFT_OUT] = left_out
    return small


def _short(value: Any) -> Any:
    """Return a copy with short texts of visible characters, and numbers of six digits."""
    if isinstance(value, str):
        return _seen(value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]} […]")
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {_seen(key): _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _seen(text: str) -> str:
    """Return a text with escapes for characters that are not shown."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in UNSEEN else f"\\u{ord(c):04x}"
        for c in text
    )


def _lists(value: Any, path: str = "") -> list[tuple[str, list[Any]]]:
    """Return the lists within a result that are not empty, with their paths."""
    found: list[tuple[str, list[Any]]] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if key != LEFT_OUT:
                found += _lists(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        found.append((path, value))
        for index, item in enumerate(value):
            found += _lists(item, f"{path}[{index}]")
    return found
