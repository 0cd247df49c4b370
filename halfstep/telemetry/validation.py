"""Field, value and allowed values of an error of msgspec, for messages."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, UnsetType

from halfstep.telemetry.plain_json import safe_repr

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r" - at `\$(.*)`$")
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")


def explain(error: msgspec.ValidationError, fields: object, kind: type[Struct]) -> str:
    """Return field, value and allowed values of the error of converting fields to a class."""
    text = str(error)
    found = _PATH.search(text)
    parts: list[str | int] = [
        name or int(index) for name, index in _PART.findall(found.group(1) if found else "")
    ]
    value: Any = fields
    hint: object = kind
    try:
        for part in parts:
            value, hint = value[part], _hint_of(hint, part)
    except (LookupError, TypeError):  # a key that the path has in another form
        return text
    path = ".".join(map(str, parts))
    if missing := _MISSING.match(text):
        return f"{path}{'.' if path else ''}{missing.group(1)} is missing"
    return f"{path} is {safe_repr(value)}; allowed: {_describe_allowed(hint)}"


def list_allowed(kind: type[Struct], field: str) -> str:
    """Return the values that a field of a class allows."""
    return _describe_allowed(_hint_of(kind, field))


def _hint_of(hint: object, part: str | int) -> object:
    """Return the type of a field of a class, or of a list's items."""
    for member in _members(hint):
        if isinstance(part, str) and isinstance(member, type) and issubclass(member, Struct):
            return get_type_hints(member, include_extras=True)[part]
        if isinstance(part, int) and get_origin(_bare(member)) is list:
            return get_args(_bare(member))[0]
    raise LookupError(f"{hint} has no {part}")


def _members(hint: object) -> Iterator[object]:
    """Yield the members of a union; another type is its only one."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _bare(hint: object) -> object:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def _describe_allowed(hint: object) -> str:
    """Return the values that a type allows, as text: the description of its first member."""
    members = [member for member in _members(hint) if member is not UnsetType]
    or_nothing = ", or nothing" if NoneType in members else ""
    first = members[0]
    if get_origin(first) is Annotated:
        metas = [meta for meta in get_args(first) if isinstance(meta, Meta) and meta.description]
        return f"{metas[0].description}{or_nothing}"
    if get_origin(first) is Literal:
        return f"one of {', '.join(get_args(first))}{or_nothing}"
    name = _NAMES.get(get_origin(first) or first, "an object")
    return f"{name}{or_nothing}"
