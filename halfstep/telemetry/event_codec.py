"""Encoding and decoding of spool events; decoding checks the bounds of every field."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, Struct, UnsetType
from numpy.typing import NDArray

from halfstep.telemetry.events import EVENT_BYTES, KINDS, Configured, Event
from halfstep.telemetry.plain_json import (
    ENCODER,
    LARGEST_WHOLE,
    JsonObject,
    json_safe,
    shown,
    unplain,
)

#: Configuration of a script as JSON: a page shows all of it.
CONFIG_CHARACTERS = 100_000
LARGEST_FLAGS = 2**31 - 1

#: A type that decodes any event. A union of all classes, which no annotation can list briefly.
ANY_EVENT: Any = Union[tuple(KINDS.values())]  # noqa: UP007 - a tuple
_DECODER = msgspec.json.Decoder(ANY_EVENT)


class BadEvent(ValueError):
    """Event that cannot be recorded; the message has field, value and allowed values."""


def encode(event: Event) -> bytes:
    """Return the JSON of an event; floats that JSON lacks become "NaN", "Infinity", "-Infinity".

    Raises BadEvent.
    """
    payload = b""
    with suppress(TypeError, UnicodeEncodeError):  # of numpy; with lone surrogates
        payload = _ENCODER.encode(event)
    if not payload or b"null" in payload:  # which msgspec also writes for floats that JSON lacks
        try:
            payload = ENCODER.encode(fields_of(event)).encode()
        except (TypeError, RecursionError) as error:
            raise BadEvent(f"{event.tag}: {error}") from error
    if len(payload) > EVENT_BYTES:
        raise BadEvent(too_long(event.tag, payload))
    decode(payload)
    return payload


def decode(payload: bytes) -> Event:
    """Return the event of a frame. Raises BadEvent."""
    if len(payload) > EVENT_BYTES:
        raise BadEvent(too_long("an event", payload))
    if b"\\u0000" not in payload:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _checked(_DECODER.decode(payload))
    try:
        fields = json_safe(json.loads(payload))  # Python reads NaN and 1e999 as well
    except (ValueError, RecursionError) as error:
        raise BadEvent(f"an event is not valid JSON: {shown(payload)}: {error}") from error
    return parse(fields)


def parse(fields: object) -> Event:
    """Return the event with these fields, which may hold anything. Raises BadEvent."""
    event = convert(fields)
    if wrong := unplain(fields):
        raise BadEvent(f"{event.tag}: {wrong}")
    return _checked(event)


def convert(fields: object) -> Event:
    """Return the event with these fields, as `fields_of` returned them. Raises BadEvent."""
    if not isinstance(fields, dict):
        raise BadEvent(f"an event is {shown(fields)}; allowed: an object")
    kind = fields.get("event")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadEvent(f"event is {shown(kind)}; allowed: {', '.join(KINDS)}")
    try:
        event = msgspec.convert(fields, KINDS[kind])
    except msgspec.ValidationError as error:
        raise BadEvent(f"{_called(fields)}: {_explained(error, fields, KINDS[kind])}") from error
    except UnicodeEncodeError as error:  # a lone surrogate in place of one of a few words
        raise BadEvent(f"{_called(fields)}: {unplain(fields) or error}") from error
    return event


def fields_of(event: Event | Struct) -> JsonObject:
    """Return an event as the JSON object that its frame holds."""
    fields: JsonObject = json_safe(msgspec.to_builtins(event, enc_hook=_builtin))
    return fields


def problem_of_steps(steps: NDArray[np.void]) -> str | None:
    """Return why records of STEP_DTYPE cannot be recorded; None if they can."""
    for name, low, high in (
        ("step", 1, LARGEST_WHOLE),
        ("elapsed_ms", -LARGEST_WHOLE, LARGEST_WHOLE),
        ("flags", 0, LARGEST_FLAGS),
    ):
        values = steps[name]
        wrong = (values < low) | (values > high)
        if wrong.any():
            value = int(values[wrong][0])
            return f"steps: {name} is {value}; allowed: a whole number from {low} to {high}"
    return None


def too_long(what: str, payload: bytes) -> str:
    """Return the message about an event of too many bytes."""
    return f"{what} has {len(payload):,} bytes; allowed: at most {EVENT_BYTES:,}"


def _checked(event: Event) -> Event:
    """Return the event. Raises BadEvent if it has a configuration that a page cannot show."""
    if isinstance(event, Configured):
        config = event.config
        if unplain(config) or len(json.dumps(config)) > CONFIG_CHARACTERS:
            allowed = f"an object of plain JSON, of at most {CONFIG_CHARACTERS:,} characters"
            raise BadEvent(f"configured: config is {shown(config)}; allowed: {allowed}")
    return event


def _builtin(value: Any) -> Any:
    """Return a subclass of float, int or str, such as numpy's float64, as its base class."""
    for base in (float, int, str):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{shown(value)} is not JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_builtin)


# ---- Messages --------------------------------------------------------------------------------


def _called(fields: JsonObject) -> str:
    name, step = fields.get("name"), fields.get("step")
    words = [fields["event"], shown(name) if name is not None else ""]
    return " ".join(filter(None, words)) + (f" at step {shown(step)}" if step is not None else "")


_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r" - at `\$(.*)`$")
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")


def _explained(error: msgspec.ValidationError, fields: JsonObject, kind: type[Event]) -> str:
    """Return field, value and allowed values of an error of msgspec."""
    text = str(error)
    found = _PATH.search(text)
    parts: list[str | int] = [
        name or int(index) for name, index in _PART.findall(found.group(1) if found else "")
    ]
    value: Any = fields
    hint: Any = kind
    try:
        for part in parts:
            value, hint = value[part], _hint_of(hint, part)
    except (LookupError, TypeError):  # a key that the path has in another form
        return text
    path = ".".join(map(str, parts))
    if missing := _MISSING.match(text):
        return f"{path}{'.' if path else ''}{missing.group(1)} is missing"
    return f"{path} is {shown(value)}; allowed: {_allowed(hint)}"


def _hint_of(hint: Any, part: str | int) -> Any:
    """Return the type of a field of a class, or of a list's items."""
    for member in _members(hint):
        if isinstance(part, str) and isinstance(member, type) and issubclass(member, Struct):
            return get_type_hints(member, include_extras=True)[part]
        if isinstance(part, int) and get_origin(_bare(member)) is list:
            return get_args(_bare(member))[0]
    raise LookupError(f"{hint} has no {part}")


def _members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union; another type is its only one."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


_NAMES: dict[Any, str] = {bool: "true or false", list: "a list", dict: "an object"}


def _allowed(hint: Any) -> str:
    """Return the values that a type allows, as text: the description of its first member."""
    members = [each for each in _members(hint) if each is not UnsetType]
    or_nothing = ", or nothing" if NoneType in members else ""
    first = members[0]
    if get_origin(first) is Annotated:
        metas = [each for each in get_args(first) if isinstance(each, Meta) and each.description]
        return f"{metas[0].description}{or_nothing}"
    if get_origin(first) is Literal:
        return f"one of {', '.join(get_args(first))}{or_nothing}"
    name = _NAMES.get(get_origin(first) or first, "an object")
    return f"{name}{or_nothing}"
