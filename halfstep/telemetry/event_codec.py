"""Encoding and decoding of spool events; decoding checks the bounds of every field."""

import json
from contextlib import suppress
from typing import Union

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from halfstep.telemetry import earlier_events
from halfstep.telemetry.events import EVENT_BYTES, KINDS, Configured, Event
from halfstep.telemetry.plain_json import (
    ENCODER,
    LARGEST_WHOLE,
    JsonObject,
    is_clean,
    json_safe,
    safe_repr,
    unplain,
)
from halfstep.telemetry.validation import explain, list_allowed

#: Configuration of a script as JSON: a page shows all of it.
CONFIG_CHARACTERS = 100_000
LARGEST_FLAGS = 2**31 - 1

#: A type that decodes any event. A union of all classes, which no annotation can list briefly.
ANY_EVENT: object = Union[tuple(KINDS.values())]  # noqa: UP007 - a tuple
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
    is_earlier = earlier_events.NAMES.search(payload) is not None
    if b"\\u0000" not in payload and not is_earlier:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _check(_DECODER.decode(payload))
    try:
        fields = json_safe(json.loads(payload))  # Python reads NaN and 1e999 as well
    except (ValueError, RecursionError) as error:
        raise BadEvent(f"an event is not valid JSON: {safe_repr(payload)}: {error}") from error
    if is_earlier and isinstance(fields, dict):
        fields = earlier_events.rename(fields)
    return parse(fields)


def parse(fields: object) -> Event:
    """Return the event with these fields, which may hold anything. Raises BadEvent."""
    event = convert(fields)
    if wrong := _unclean_field(event) or unplain(fields):
        raise BadEvent(f"{event.tag}: {wrong}")
    return _check(event)


def convert(fields: object) -> Event:
    """Return the event with these fields, as `fields_of` returned them. Raises BadEvent."""
    if not isinstance(fields, dict):
        raise BadEvent(f"an event is {safe_repr(fields)}; allowed: an object")
    kind = fields.get("event")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadEvent(f"event is {safe_repr(kind)}; allowed: {', '.join(KINDS)}")
    try:
        event = msgspec.convert(fields, KINDS[kind])
    except msgspec.ValidationError as error:
        raise BadEvent(f"{_describe(fields)}: {explain(error, fields, KINDS[kind])}") from error
    except UnicodeEncodeError as error:  # a lone surrogate in place of one of a few words
        raise BadEvent(f"{_describe(fields)}: {unplain(fields) or error}") from error
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


def _check(event: Event) -> Event:
    """Return the event. Raises BadEvent if it has a configuration that a page cannot show."""
    if isinstance(event, Configured):
        config = event.config
        if unplain(config) or len(json.dumps(config)) > CONFIG_CHARACTERS:
            allowed = f"an object of plain JSON, of at most {CONFIG_CHARACTERS:,} characters"
            raise BadEvent(f"configured: config is {safe_repr(config)}; allowed: {allowed}")
    return event


def _builtin(value: object) -> object:
    """Return a subclass of float, int or str, such as numpy's float64, as its base class."""
    for base in (float, int, str):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{safe_repr(value)} is not JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_builtin)


def _unclean_field(event: Event) -> str | None:
    """Return which text of an event cannot be stored, with what is allowed there."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str) and not is_clean(value):
            return f"{name} is {safe_repr(value)}; allowed: {list_allowed(type(event), name)}"
    return None


def _describe(fields: JsonObject) -> str:
    name, step = fields.get("name"), fields.get("step")
    words = [fields["event"], safe_repr(name) if name is not None else ""]
    return " ".join(filter(None, words)) + (
        f" at step {safe_repr(step)}" if step is not None else ""
    )
