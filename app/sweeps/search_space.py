"""Search spaces: the notation of values and distributions, and the points of a space.

    0.1, 0.01, 0.001           these values; off: null, for a nullable setting
    16..64 step 16             16, 32, 48, 64; the default step of whole numbers is 1
    uniform(0.1, 0.5)          any number between the two
    loguniform(1e-5, 0.1)      any number between the two, uniform in its logarithm
    integers(1, 8)             any whole number from 1 to 8
    normal(0, 0.1)             by mean and standard deviation
    lognormal(-7, 1)           a number whose logarithm is normal
    loguniform(8, 512) step 8  rounded to a multiple of 8
    0.8, 0.9 when optimizer = sgd     searched only with that value of another setting

A space is JSON: by path of a setting {"values": […]}, with "probabilities" if they differ, or
{"distribution": …, "low": …, "high": …}, of normal ones "mean" and "std"; with "step" and "when"
({"optimizer": ["sgd"]}) as above.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from jsonschema import Draft202012Validator

from app.http.parameters import find_outsized, flaws
from app.submission import config_schema, forms
from app.submission.config_schema import Property, Schema
from halfstep import number_formats
from halfstep.suggestions import did_you_mean
from halfstep.telemetry.plain_json import JsonObject

GRID, RANDOM, TPE, CMAES, QMC = KINDS = ("grid", "random", "tpe", "cmaes", "qmc")
UNIFORM, LOGUNIFORM, INTEGERS, NORMAL, LOGNORMAL = DISTRIBUTIONS = (
    *("uniform", "loguniform", "integers"),
    *("normal", "lognormal"),
)
#: Distributions by mean and standard deviation instead of bounds.
NORMALS = (NORMAL, LOGNORMAL)
#: Limit of points that are counted of a grid with conditions.
MOST_COUNTED = 100_000
#: Limit of values of one setting.
MOST_VALUES = 1000
#: Limit of settings of one sweep.
MOST_SETTINGS = 20
NOTATION = "comma-separated values, 1..9 step 2, uniform(a, b), loguniform(a, b), "
NOTATION += "integers(a, b), normal(mean, std), lognormal(mean, std); with 'step S' rounded to "
NOTATION += "multiples, with 'when NAME = VALUES' only with values of another setting"

SEVERAL = "to try several: 0.1, 0.01 with a comma in between, or loguniform(0.001, 0.1)"

_RANGE = re.compile(r"^([^,()]+?)\.\.([^,()]+?)(?:\s+step\s+(\S+))?$")
_DISTRIBUTION = re.compile(r"^(\w+)\s*\((.*)\)(?:\s+step\s+(\S+))?$")
_WHEN = re.compile(r"^(.*?)\s+when\s+(\S+)\s*=\s*(.+)$")
_WORDS = {"true": True, "yes": True, "false": False, "no": False}

Space = dict[str, JsonObject]


class Unreadable(Exception):
    """An invalid search value of a setting."""


def is_searchable(field: Property) -> bool:
    """Whether the notation can express values of a setting; free text may contain commas."""
    return "enum" in field.rules or field.rules.get("type") in ("number", "integer", "boolean")


def with_notation(field: Property, error: str) -> str:
    """Return the error of a value with the notation of several ones, which it may have meant."""
    is_number = field.rules.get("type") in ("number", "integer") and "enum" not in field.rules
    return f"{error}; {SEVERAL}" if is_number else error


def is_search(field: Property, text: str) -> bool:
    """Return whether a form field contains a search instead of a single value."""
    is_more = "," in text or any(p.match(text) for p in (_RANGE, _DISTRIBUTION, _WHEN))
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
            meant = did_you_mean(path, fields)
            text = f"there is no such setting; {meant}allowed: a path of the recipe's schema"
            errors[path[:100]] = text
            continue
        try:
            space[path] = _with_condition(fields, path, search, given)
        except Unreadable as error:
            errors[path] = str(error)
            continue
        if kind == GRID:
            space[path].pop("probabilities", None)  # every point is tried
        if kind == GRID and "distribution" in space[path]:
            text = f"{in_words(space[path])} has infinitely many values"
            errors[path] = f"{text}; allowed in a grid: values, or a range like 1..9 step 2"
    return (space, errors) if errors else _in_order(space)


def _with_condition(
    fields: dict[str, Property], path: str, search: object, given: JsonObject
) -> JsonObject:
    """Return an entry of a space with its condition. Raises Unreadable."""
    when: object = None
    if isinstance(search, str) and (match := _WHEN.match(search.strip())):
        search, when = match[1], {match[2]: match[3]}
    elif isinstance(search, dict):
        search = dict(search)
        when = search.pop("when", None)
    entry = _search(fields[path], search)
    if when is None:
        return entry
    if not isinstance(when, dict) or not when:
        raise Unreadable(f"when is {str(when)[:100]}; allowed: values of searched settings by name")
    conditions: dict[str, list[Any]] = {}
    for name, values in when.items():
        if name not in given or name == path or name not in fields:
            raise Unreadable(f"when {str(name)[:100]}: not searched; allowed: a searched setting")
        if isinstance(values, str):
            values = [_value(fields[name], part) for part in values.split(",")]
        elif not isinstance(values, list):
            values = [values]
        conditions[name] = [_parse_allowed(fields[name], value) for value in values]
    return entry | {"when": conditions}


def _in_order(space: Space) -> tuple[Space, dict[str, str]]:
    """Order a space so that conditions are on settings before; return errors by path."""
    ordered: Space = {}
    while left := [path for path in space if path not in ordered]:
        ready = [path for path in left if space[path].get("when", {}).keys() <= ordered.keys()]
        if not ready:
            return space, dict.fromkeys(left, "its condition is on a setting whose is on this one")
        ordered |= {path: space[path] for path in ready}
    for path, search in space.items():
        for name, values in search.get("when", {}).items():
            known = space[name].get("values")
            if known is None or any(value not in known for value in values):
                text = f"when {name} = {', '.join(map(_word, values))} is never true"
                return space, {path: f"{text}; allowed: values that are searched"}
    return ordered, {}


def is_active(search: JsonObject, point: JsonObject) -> bool:
    """Return whether a setting is searched in a point, by the settings before it."""
    when = search.get("when", {})
    return all(name in point and point[name] in values for name, values in when.items())


def guess(given: object) -> Schema:
    """Return the type of an undeclared setting, inferred from its search values."""
    if isinstance(given, dict) and "distribution" in given:
        return {"type": _drawn_type(given["distribution"], given.get("step"))}
    if isinstance(given, dict):
        given = given.get("values")
    if isinstance(given, list):
        return {"type": _type_of(given)}
    text = str(given).strip()
    text = match[1] if (match := _WHEN.match(text)) else text
    if match := _DISTRIBUTION.match(text):
        return {"type": _drawn_type(match[1], _read(match[3] or ""))}
    if match := _RANGE.match(text):
        return {"type": _type_of([_read(part) for part in match.groups() if part])}
    words = [part.strip() for part in text.split(",")]
    kind = _type_of([_read(word) for word in words])
    return {"type": kind, "enum": words} if kind == "string" else {"type": kind}


def _drawn_type(distribution: str, step: object) -> str:
    return "integer" if distribution == INTEGERS or type(step) is int else "number"


def _type_of(values: list[object]) -> str:
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


def in_words(search: JsonObject) -> str:
    """Return a search in the notation."""
    when = " and ".join(
        f"{name} = {', '.join(map(_word, values))}"
        for name, values in search.get("when", {}).items()
    )
    return _unconditional(search) + (f" when {when}" if when else "")


def _unconditional(search: JsonObject) -> str:
    if "probabilities" in search:
        pairs = zip(search["values"], search["probabilities"], strict=True)
        return ", ".join(f"{_word(value)} ({number_formats.number(p)})" for value, p in pairs)
    if "values" in search:
        return ", ".join(_word(value) for value in search["values"])
    bounds = ("mean", "std") if search["distribution"] in NORMALS else ("low", "high")
    text = f"{search['distribution']}({', '.join(_word(search[name]) for name in bounds)})"
    return text + (f" step {_word(search['step'])}" if "step" in search else "")


def _word(value: object) -> str:
    return "off" if value is None else forms.input_text(value)


def _search(field: Property, given: object) -> JsonObject:
    if isinstance(given, str):
        if not is_searchable(field):
            text = f"{given[:100]} is not valid; allowed: a list of values as JSON"
            raise Unreadable(text)
        return _of_text(field, given.strip())
    if isinstance(given, list):
        return {"values": _check(field, given)}
    if isinstance(given, dict) and isinstance(given.get("values"), list):
        if given.keys() == {"values"}:
            return {"values": _check(field, given["values"])}
        if given.keys() == {"values", "probabilities"}:
            return _weigh(_check(field, given["values"]), given["probabilities"])
    if isinstance(given, dict) and "distribution" in given:
        name, step = given["distribution"], given.get("step")
        for bounds in (("low", "high"), ("mean", "std")):
            if given.keys() - {"step"} == {"distribution", *bounds}:
                return _distribution(field, name, given[bounds[0]], given[bounds[1]], step)
    raise Unreadable(f"{str(given)[:100]} is not valid; allowed: {NOTATION}")


def _weigh(values: list[object], given: Any) -> JsonObject:
    """Return values with their probabilities, which are divided by their sum."""
    is_list = isinstance(given, list) and len(given) == len(values)
    if (
        not is_list
        or not all(_is_finite(weight) and weight >= 0 for weight in given)
        or not sum(given)
    ):
        raise Unreadable(f"probabilities is {str(given)[:100]}; allowed: one number for each value")
    return {"values": values, "probabilities": [weight / sum(given) for weight in given]}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_text(field: Property, text: str) -> JsonObject:
    if match := _DISTRIBUTION.match(text):
        bounds = [_value(field, part) for part in match[2].split(",")]
        if len(bounds) != 2:
            raise Unreadable(f"{text[:100]} is not valid; allowed: two numbers in the brackets")
        step = _read(match[3]) if match[3] else None
        return _distribution(field, match[1], bounds[0], bounds[1], step)
    if match := _RANGE.match(text):
        return {"values": _check(field, _steps(field, text, *match.groups()))}
    try:
        values = [_parse_allowed(field, _value(field, part)) for part in text.split(",")]
    except Unreadable as error:
        raise Unreadable(with_notation(field, str(error))) from None
    return {"values": _check(field, values)}


def _value(field: Property, text: str) -> object:
    text = text.strip()
    if text == "off" and field.is_nullable:
        return None
    if field.rules.get("type") == "boolean":
        return _WORDS.get(text.lower(), text)
    if field.rules.get("type") == "number" and re.fullmatch(r"-?[0-9]{1,15}", text):
        return int(text)  # so that a script which parses integers receives 16, not 16.0
    return forms.parse(field, text) if text else text


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


def _check(field: Property, values: list[object]) -> list[object]:
    if not 1 <= len(values) <= MOST_VALUES:
        text = f"it has {len(values):,} values"
        raise Unreadable(f"{text}; allowed: 1 to {MOST_VALUES:,}")
    checked = [_parse_allowed(field, value) for value in values]
    for index, value in enumerate(checked):
        if any(
            value == other and isinstance(value, bool) is isinstance(other, bool)
            for other in checked[:index]
        ):
            raise Unreadable(f"it has {_word(value)} twice; allowed: each value once")
    return checked


def _distribution(field: Property, name: Any, low: Any, high: Any, step: Any = None) -> JsonObject:
    kind = field.rules.get("type")
    if step is not None and not (_is_finite(step) and step > 0):
        raise Unreadable(f"step is {str(step)[:50]}; allowed: a number greater than 0")
    is_whole = step is not None and step == int(step)
    allowed = {"integer": DISTRIBUTIONS if is_whole else (INTEGERS,), "number": DISTRIBUTIONS}
    names = allowed.get(str(kind), ())
    if "enum" in field.rules or name not in names:
        other = f"{' or '.join(f'{known}(a, b)' for known in names)}, or " if names else ""
        text = f"{str(name)[:50]}(…) is not valid; allowed: {other}comma-separated values"
        raise Unreadable(text)
    more = {} if step is None else {"step": int(step) if kind == "integer" else step}
    if name in NORMALS:
        if not (_is_finite(low) and _is_finite(high) and high > 0):
            text = f"{name}({str(low)[:50]}, {str(high)[:50]}) is not valid"
            raise Unreadable(f"{text}; allowed: a mean, and a standard deviation greater than 0")
        return {"distribution": name, "mean": low, "std": high} | more
    ends = "two numbers greater than 0" if name == LOGUNIFORM else "two numbers"
    is_turned = all(isinstance(bound, int | float) for bound in (low, high)) and low > high
    if not is_turned:
        low, high = _parse_allowed(field, low), _parse_allowed(field, high)
    is_ordered = low is not None and high is not None and low < high
    if not is_ordered or (name == LOGUNIFORM and low <= 0):
        text = f"{name}({_word(low)}, {_word(high)})"
        text += ": the first bound is greater than the second" if is_turned else " is not valid"
        raise Unreadable(f"{text}; allowed: {ends}, the lower one first")
    if name == INTEGERS:
        if low != int(low) or high != int(high):
            raise Unreadable(f"it is between {low} and {high}; allowed: whole numbers")
        low, high = int(low), int(high)
    return {"distribution": name, "low": low, "high": high} | more


def _parse_allowed(field: Property, value: object) -> object:
    """Return a value in the schema's type. Raises Unreadable."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    is_storable = not find_outsized(value) and not flaws(value)
    if not (is_finite and is_storable and Draft202012Validator(field.schema).is_valid(value)):
        raise Unreadable(config_schema.violation(field, _word(value)[:100] if is_storable else "…"))
    return config_schema.parse(field.schema, value)


def grid_size(space: Space) -> int:
    """Return the number of points of a grid; with conditions at most MOST_COUNTED."""
    if any("when" in search for search in space.values()):
        return sum(1 for _ in itertools.islice(grid(space), MOST_COUNTED))
    return math.prod(len(search["values"]) for search in space.values())


def grid(space: Space) -> Iterator[JsonObject]:
    """Yield the points of a grid; the last setting varies fastest."""

    def points(paths: list[str], point: JsonObject) -> Iterator[JsonObject]:
        if not paths:
            yield point
        elif is_active(space[paths[0]], point):
            for value in space[paths[0]]["values"]:
                yield from points(paths[1:], point | {paths[0]: value})
        else:
            yield from points(paths[1:], point)

    yield from points([*space], {})


def name(point: JsonObject) -> str:
    """Return a run's name from its point: lr=0.003, or training.lr=0.003 if lr is ambiguous."""
    ends = Counter(path.rpartition(".")[2] for path in point)
    labels = {path: path.rpartition(".")[2] for path in point}
    labels = {path: end if ends[end] == 1 else path for path, end in labels.items()}
    return ", ".join(f"{labels[path]}={_short(value)}" for path, value in point.items())


def name_of(space: Space) -> str:
    """Return a sweep's name from its searched settings: lr, batch_size."""
    return ", ".join(path.rpartition(".")[2] for path in space)


def _short(value: object) -> str:
    if isinstance(value, float):
        return number_formats.number(value)
    return _word(value)
