"""Search spaces: the notation of values and distributions, and the points of a space.

    0.1, 0.01, 0.001           these values; off: null, for a nullable setting
    16..64 step 16             16, 32, 48, 64; the default step of whole numbers is 1
    uniform(0.1, 0.5)          any number between the two
    loguniform(1e-5, 0.1)      any number between the two, uniform in its logarithm
    integers(1, 8)             any whole number from 1 to 8

A space is JSON: by path of a setting {"values": […]} or {"distribution": …, "low": …, "high": …}.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from app.http.parameters import flaws, outsized
from app.submission import config_schema, forms
from app.submission.config_schema import Property, Schema
from db.sweeps.sweeps import HYPERBAND
from halfstep import number_formats
from halfstep.telemetry.plain_json import JsonObject

GRID, RANDOM, TPE = "grid", "random", "tpe"
KINDS = (GRID, RANDOM, TPE, HYPERBAND)
#: Kinds that need Optuna.
BY_OPTUNA = (TPE, HYPERBAND)
UNIFORM, LOGUNIFORM, INTEGERS = DISTRIBUTIONS = ("uniform", "loguniform", "integers")
#: Limit of values of one setting.
MOST_VALUES = 1000
#: Limit of settings of one sweep.
MOST_SETTINGS = 20
#: Significant digits of a drawn number, for readability.
DIGITS = 6
NOTATION = "comma-separated values, 1..9 step 2, uniform(a, b), loguniform(a, b) or "
NOTATION += "integers(a, b)"

_RANGE = re.compile(r"^([^,()]+?)\.\.([^,()]+?)(?:\s+step\s+(\S+))?$")
_DISTRIBUTION = re.compile(r"^(\w+)\s*\((.*)\)$")
_WORDS = {"true": True, "yes": True, "false": False, "no": False}

Space = dict[str, dict[str, Any]]


class Unreadable(Exception):
    """An invalid search value of a setting."""


def is_searchable(field: Property) -> bool:
    """Whether the notation can express values of a setting; free text may contain commas."""
    return "enum" in field.rules or field.rules.get("type") in ("number", "integer", "boolean")


def is_search(field: Property, text: str) -> bool:
    """Return whether a form field contains a search instead of a single value."""
    is_more = "," in text or bool(_RANGE.match(text) or _DISTRIBUTION.match(text))
    return is_searchable(field) and is_more


def read(schema: Schema, given: JsonObject, kind: str) -> tuple[Space, dict[str, str]]:
    """Return the space, and errors by path.

    given: by path, a text in the notation, a list of values, or an entry of a space.
    """
    fields = {field.path: field for field in config_schema.properties(schema)}
    space: Space = {}
    errors: dict[str, str] = {}
    if not given or len(given) > MOST_SETTINGS:
        errors["space"] = f"{len(given)} settings are searched; allowed: 1 to {MOST_SETTINGS}"
        return space, errors
    for path, search in given.items():
        if path not in fields:
            errors[path[:100]] = "there is no such setting; allowed: a path of the recipe's schema"
            continue
        try:
            space[path] = _search(fields[path], search)
        except Unreadable as error:
            errors[path] = str(error)
            continue
        if kind == GRID and "distribution" in space[path]:
            text = f"{in_words(space[path])} has infinitely many values"
            errors[path] = f"{text}; allowed in a grid: values, or a range like 1..9 step 2"
    return space, errors


def guessed(given: Any) -> Schema:
    """Return the type of an undeclared setting, inferred from its search values."""
    if isinstance(given, dict) and "distribution" in given:
        return {"type": "integer" if given["distribution"] == INTEGERS else "number"}
    if isinstance(given, dict):
        given = given.get("values")
    if isinstance(given, list):
        return {"type": _type_of(given)}
    text = str(given).strip()
    if match := _DISTRIBUTION.match(text):
        return {"type": "integer" if match[1] == INTEGERS else "number"}
    if match := _RANGE.match(text):
        return {"type": _type_of([_read(part) for part in match.groups() if part])}
    words = [part.strip() for part in text.split(",")]
    kind = _type_of([_read(word) for word in words])
    return {"type": kind, "enum": words} if kind == "string" else {"type": kind}


def _type_of(values: list[Any]) -> str:
    kinds = {type(value) for value in values}
    for name, allowed in (("boolean", {bool}), ("integer", {int}), ("number", {int, float})):
        if kinds and kinds <= allowed:
            return name
    return "string"


def _read(word: str) -> bool | int | float | str:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def in_words(search: dict[str, Any]) -> str:
    """Return a search in the notation."""
    if "values" in search:
        return ", ".join(_word(value) for value in search["values"])
    return f"{search['distribution']}({_word(search['low'])}, {_word(search['high'])})"


def _word(value: Any) -> str:
    return "off" if value is None else forms.input_text(value)


def _search(field: Property, given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        if not is_searchable(field):
            text = f"{given[:100]} is not valid; allowed: a list of values as JSON"
            raise Unreadable(text)
        return _of_text(field, given.strip())
    if isinstance(given, list):
        return {"values": _checked(field, given)}
    if isinstance(given, dict) and given.keys() == {"values"} and isinstance(given["values"], list):
        return {"values": _checked(field, given["values"])}
    if isinstance(given, dict) and given.keys() == {"distribution", "low", "high"}:
        return _distribution(field, given["distribution"], given["low"], given["high"])
    raise Unreadable(f"{str(given)[:100]} is not valid; allowed: {NOTATION}")


def _of_text(field: Property, text: str) -> dict[str, Any]:
    if match := _DISTRIBUTION.match(text):
        bounds = [_value(field, part) for part in match[2].split(",")]
        if len(bounds) != 2:
            raise Unreadable(f"{text[:100]} is not valid; allowed: two bounds, low and high")
        return _distribution(field, match[1], *bounds)
    if match := _RANGE.match(text):
        return {"values": _checked(field, _steps(field, text, *match.groups()))}
    return {"values": _checked(field, [_value(field, part) for part in text.split(",")])}


def _value(field: Property, text: str) -> Any:
    text = text.strip()
    if text == "off" and field.is_nullable:
        return None
    if field.rules.get("type") == "boolean":
        return _WORDS.get(text.lower(), text)
    if field.rules.get("type") == "number" and re.fullmatch(r"-?[0-9]{1,15}", text):
        return int(text)  # so that a script which parses integers receives 16, not 16.0
    return forms.parsed(field, text) if text else text


def _steps(field: Property, text: str, first: str, last: str, step: str | None) -> list[Any]:
    """Return the values of a range, with the precision of its text."""
    is_whole = field.rules.get("type") == "integer"
    try:
        low, high = Decimal(first.strip()), Decimal(last.strip())
        apart = Decimal(step) if step else Decimal(1 if is_whole else 0)
        count = (high - low) // apart + 1 if apart > 0 and high >= low else 0
    except (InvalidOperation, ArithmeticError):
        count = Decimal(0)
    if not 1 <= count <= MOST_VALUES:
        text = f"{text[:100]} is not valid; allowed: lowest..highest step S, {MOST_VALUES:,}"
        raise Unreadable(f"{text} values at most{', or without a step' if is_whole else ''}")
    values = [low + apart * index for index in range(int(count))]
    return [int(value) if value == value.to_integral() else float(value) for value in values]


def _checked(field: Property, values: list[Any]) -> list[Any]:
    if not 1 <= len(values) <= MOST_VALUES:
        text = f"it has {len(values):,} values"
        raise Unreadable(f"{text}; allowed: 1 to {MOST_VALUES:,}")
    checked = [_allowed(field, value) for value in values]
    for index, value in enumerate(checked):
        if any(
            value == other and isinstance(value, bool) is isinstance(other, bool)
            for other in checked[:index]
        ):
            raise Unreadable(f"it has {_word(value)} twice; allowed: each value once")
    return checked


def _distribution(field: Property, name: Any, low: Any, high: Any) -> dict[str, Any]:
    kind = field.rules.get("type")
    allowed = {"integer": (INTEGERS,), "number": DISTRIBUTIONS}.get(str(kind), ())
    if "enum" in field.rules or name not in allowed:
        other = f"{' or '.join(f'{known}(a, b)' for known in allowed)}, or " if allowed else ""
        text = f"{str(name)[:50]}(…) is not valid; allowed: {other}comma-separated values"
        raise Unreadable(text)
    ends = "two numbers greater than 0" if name == LOGUNIFORM else "two numbers"
    is_turned = all(isinstance(bound, int | float) for bound in (low, high)) and low > high
    if not is_turned:
        low, high = _allowed(field, low), _allowed(field, high)
    is_ordered = low is not None and high is not None and low < high
    if not is_ordered or (name == LOGUNIFORM and low <= 0):
        text = f"{name}({_word(low)}, {_word(high)})"
        text += ": the first bound is greater than the second" if is_turned else " is not valid"
        raise Unreadable(f"{text}; allowed: {ends}, the lower one first")
    if name == INTEGERS:
        if low != int(low) or high != int(high):
            raise Unreadable(f"it is between {low} and {high}; allowed: whole numbers")
        low, high = int(low), int(high)
    return {"distribution": name, "low": low, "high": high}


def _allowed(field: Property, value: Any) -> Any:
    """Return a value in the schema's type. Raises Unreadable."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    is_storable = not outsized(value) and not flaws(value)
    if not (is_finite and is_storable and Draft202012Validator(field.schema).is_valid(value)):
        raise Unreadable(config_schema.violation(field, _word(value)[:100] if is_storable else "…"))
    return config_schema.parsed(field.schema, value)


def grid_size(space: Space) -> int:
    """Return the number of points of a grid."""
    return math.prod(len(search["values"]) for search in space.values())


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """Yield the points of a grid; the last setting varies fastest."""
    for values in itertools.product(*(search["values"] for search in space.values())):
        yield dict(zip(space, values, strict=True))


def drawn(space: Space, seed: int, number: int) -> dict[str, Any]:
    """Return the point of a random search by number; deterministic."""
    generator = np.random.default_rng([seed, number])
    point: JsonObject = {}
    for path, search in space.items():
        if "values" in search:
            point[path] = search["values"][int(generator.integers(len(search["values"])))]
        elif search["distribution"] == INTEGERS:
            point[path] = int(generator.integers(search["low"], search["high"], endpoint=True))
        else:
            is_log = search["distribution"] == LOGUNIFORM
            bounds = (search["low"], search["high"])
            low, high = (math.log(bound) if is_log else bound for bound in bounds)
            value = float(generator.uniform(low, high))
            point[path] = rounded(math.exp(value) if is_log else value, search)
    return point


def rounded(number: float, search: dict[str, Any]) -> float:
    """Return a number rounded for reading, still within the bounds."""
    return float(min(max(float(f"{number:.{DIGITS}g}"), search["low"]), search["high"]))


def name(point: JsonObject) -> str:
    """Return a run's name from its point: lr=0.003, or training.lr=0.003 if lr is ambiguous."""
    ends = Counter(path.rpartition(".")[2] for path in point)
    labels = {path: path.rpartition(".")[2] for path in point}
    labels = {path: end if ends[end] == 1 else path for path, end in labels.items()}
    return ", ".join(f"{labels[path]}={_short(value)}" for path, value in point.items())


def name_of(space: Space) -> str:
    """Return a sweep's name from its searched settings: lr, batch_size."""
    return ", ".join(path.rpartition(".")[2] for path in space)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return number_formats.number(value)
    return _word(value)
