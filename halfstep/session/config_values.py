"""Conversion of a script's configuration to JSON, value by value.

numpy and torch scalars become numbers; enums their values; paths, dtypes, devices, functions and
classes texts; dataclasses, namespaces, pydantic and attrs models and OmegaConf configurations
objects. A value that cannot be converted becomes a note; the others are stored.
"""

import dataclasses
import enum
import heapq
import itertools
import json
import math
import numbers
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from halfstep.telemetry.event_codec import CONFIG_CHARACTERS
from halfstep.telemetry.plain_json import LARGEST_WHOLE, clean, safe_repr

#: Limits: nesting of objects and lists, entries of one and of all, characters of text and note.
MAX_DEPTH, MAX_ITEMS, MAX_ENTRIES, MAX_TEXT, MAX_NAME = 9, 1000, 2000, 2000, 200
MAX_LINES = 20  # on stderr, for one configuration
MISSING = "???"  # OmegaConf's notation for a missing mandatory value
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

OnLoss = Callable[[str], None]


def as_config(value: object, on_loss: OnLoss = lambda _: None) -> Any:
    """Convert a configuration to JSON, with notes for values that JSON cannot hold.

    on_loss: called with a line for each of these, at most MAX_LINES times. Only tensors on the CPU
    are read.
    """
    converter = _Converter(on_loss)
    return _fitting(converter.convert(value), converter.report)


class _Place(NamedTuple):
    """Location of a value in the configuration."""

    path: str
    top: str  # first name of the path
    parents: tuple[int, ...]  # ids of the objects and lists around it
    entries: int  # total number of their entries


class _Converter:
    """Converter that handles small objects and lists first, so only large ones are cut.

    Top-level values take turns: what one has used so far counts as its size.
    """

    def __init__(self, on_loss: OnLoss) -> None:
        self._on_loss, self._lines, self._entries_left = on_loss, 0, MAX_ENTRIES
        self._taken_by: Counter[str] = Counter()  # entries, by top-level name
        self._count = itertools.count()
        self._waiting: list[tuple[int, int, Any]] = []  # a heap

    def convert(self, value: Any) -> Any:
        """Convert a value and everything in it."""
        converted = self._convert_safely(lambda: value, _Place("", "", (), 0))
        while self._waiting:
            heapq.heappop(self._waiting)[2]()
        return converted

    def report(self, line: str) -> None:
        """Report a loss, at most MAX_LINES times."""
        self._lines += 1
        if self._lines < MAX_LINES:
            self._on_loss(line)
        elif self._lines == MAX_LINES:
            self._on_loss("config: further values were replaced with notes")

    def _convert_safely(self, get: Callable[[], object], place: _Place) -> Any:
        try:
            return self._convert(get(), place)
        except Exception as error:  # the script's proxy, property or interpolation can raise
            if type(error).__name__ == "MissingMandatoryValue":
                self._lost(place.path, "missing")
                return MISSING
            return self._lost(place.path, _why(error))

    def _convert(self, value: object, place: _Place) -> object:
        if value is None or type(value) in (bool, float):
            return value
        if isinstance(value, enum.Enum):
            is_plain = isinstance(value.value, bool | int | float | str)
            return self._convert(value.value if is_plain else value.name, place)
        if isinstance(value, str | bytes | os.PathLike):
            return self._text(value, place.path)
        if type(value) is int and abs(value) <= LARGEST_WHOLE:
            return value
        if not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "shape"):
            if (summary := _summary(value)) is not None:
                return self._lost(place.path, summary)
            value = _on_numpy(value)
            if isinstance(value, np.ndarray) and not value.ndim:
                return self._convert(value[()], place)
        if (number := _number(value)) is not None:
            return number
        if id(value) in place.parents:
            return self._lost(place.path, "a cycle: it contains itself")
        entries = _entries(value)
        items = None if entries is not None else _items(value)
        if entries is None and items is None:
            return self._text(_words(value), place.path)
        if len(place.parents) >= MAX_DEPTH:
            return self._lost(place.path, f"nested deeper than {MAX_DEPTH} levels")
        total = place.entries + _size(value)
        inner = place._replace(parents=(*place.parents, id(value)), entries=total)
        converted: Any = [] if entries is None else {}
        fill = self._fill_list if entries is None else self._fill_object
        work = partial(self._fill, fill, converted, items if entries is None else entries, inner)
        order = self._taken_by[place.top] + total
        heapq.heappush(self._waiting, (order, next(self._count), work))
        return converted

    def _fill(self, fill: Any, converted: Any, entries: object, place: _Place) -> None:
        """Fill an object or a list; keep the entries read so far if iteration fails."""
        try:
            fill(converted, entries, place)
        except Exception as error:
            note = self._lost(place.path, _why(error))
            converted.update({"…": note}) if isinstance(converted, dict) else converted.append(note)

    def _text(self, value: object, path: str) -> str:
        raw = os.fspath(value) if isinstance(value, os.PathLike) else value
        text = raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else str(raw)
        text = clean(text)
        if len(text) <= MAX_TEXT:
            return text
        self._lost(path, f"cut to {MAX_TEXT:,} of {len(text):,} characters")
        return f"{text[:MAX_TEXT]}…"

    def _fill_object(
        self,
        converted: dict[str, object],
        entries: Iterator[tuple[Any, Callable[[], object]]],
        place: _Place,
    ) -> None:
        for key, get in self._take(entries, place):
            name = clean(str(key.name if isinstance(key, enum.Enum) else key))[:MAX_NAME]
            converted[name] = self._convert_safely(get, _below(place, name))
        if next(entries, None) is not None:
            converted["…"] = self._lost(place.path, self._too_many())

    def _fill_list(
        self, converted: list[object], items: Iterator[Callable[[], Any]], place: _Place
    ) -> None:
        for number, get in enumerate(self._take(items, place)):
            converted.append(self._convert_safely(get, _below(place, str(number))))
        if next(items, None) is not None:
            converted.append(self._lost(place.path, self._too_many()))

    def _take(self, entries: Iterator[object], place: _Place) -> list[Any]:
        """Take the entries of an object or list that the limits allow."""
        allowed = list(islice(entries, min(MAX_ITEMS, self._entries_left)))
        self._entries_left -= len(allowed)
        self._taken_by[place.top] += len(allowed)
        return allowed

    def _too_many(self) -> str:
        bound = f"{MAX_ITEMS:,} entries" if self._entries_left else f"{MAX_ENTRIES:,} in all"
        return f"more than {bound}; the rest is left out"

    def _lost(self, path: str, why: str) -> str:
        self.report(f"config: {path or 'it'} is {why}")
        return f"({why})"


def _below(place: _Place, name: str) -> _Place:
    path = f"{place.path}.{name}" if place.path else name
    return place._replace(path=path, top=place.top if place.parents[1:] else name)


def _why(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unreadable: {clean(text)[:MAX_NAME]}"


def _summary(value: Any) -> str | None:
    """Describe an array or tensor that is on a device or too large; None if it can be read."""
    is_tensor = hasattr(value, "detach")
    device = value.device if is_tensor else getattr(value, "device", "an unknown device")
    is_numpys = isinstance(value, np.ndarray | np.generic)
    is_on_host = getattr(device, "type", None) == "cpu" if is_tensor else is_numpys
    if is_on_host and math.prod(value.shape) <= MAX_ITEMS:
        return None
    kind = "a tensor" if is_tensor else "an array"
    where = "the CPU" if is_on_host else str(device)
    return f"{kind} of {value.dtype}, shape {tuple(value.shape)}, on {where}"


def _on_numpy(value: Any) -> object:
    """Convert a CPU tensor to an array; return an array unchanged."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().resolve_conj()
    try:
        return value.numpy()
    except TypeError:  # bfloat16 and other dtypes that numpy lacks
        return value.float().numpy()


def _number(value: object) -> int | float | str | None:
    """Convert a number to Python's, at its own precision; None for any other value."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, np.floating) and not isinstance(value, float):
        return float(str(value))  # float32 0.1 is 0.1, not 0.10000000149011612
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if abs(whole) <= LARGEST_WHOLE else safe_repr(whole)
    return float(value) if isinstance(value, numbers.Real | Decimal) else None


def _entries(value: object) -> Iterator[tuple[object, Callable[[], object]]] | None:
    """Return an object's names, each with a getter of its value; None for other values."""
    if isinstance(value, Mapping):
        return ((key, partial(value.__getitem__, key)) for key in value)
    if isinstance(value, type | ModuleType) or callable(value):
        return None
    names = _field_names(value)
    return None if names is None else ((name, partial(getattr, value, name)) for name in names)


def _field_names(value: object) -> list[str] | None:
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [field.name for field in kind.__attrs_attrs__]
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        names = [*kind._fields]
    elif isinstance(value, Sequence | Set) or hasattr(value, "ndim"):
        return None
    else:
        names = [*getattr(value, "__dict__", ()), *(getattr(value, "__pydantic_extra__", ()) or ())]
        names = [name for name in names if not str(name).startswith("_")]
        return list(dict.fromkeys(names)) or None  # a SecretStr has only private ones
    return names


def _size(value: object) -> int:
    """Return how many entries an object or a list has."""
    return len(value) if hasattr(value, "__len__") else len(_field_names(value) or ())


def _items(value: object) -> Iterator[Callable[[], object]] | None:
    """Return getters of the entries of a list, set or array, in order; None for other values."""
    if isinstance(value, type):
        return None
    if isinstance(value, np.ndarray):
        return (partial(value.__getitem__, number) for number in range(len(value)))
    if isinstance(value, Set):
        ordered: Any = value
        with suppress(TypeError):
            ordered = sorted(value) if len(value) <= MAX_ITEMS else value
        return (partial(lambda entry: entry, entry) for entry in ordered)
    if isinstance(value, Sequence):
        return (partial(value.__getitem__, number) for number in range(len(value)))
    return None


def _words(value: object) -> str:
    """Return text for any other object, without addresses, so the same in every process."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        module = getattr(value, "__module__", None)
        prefix = "" if module in (None, "builtins", "__main__") else f"{module}."
        return f"{prefix}{value.__qualname__}"
    return ADDRESS.sub("", str(value))


def _fitting(config: object, on_loss: OnLoss) -> object:
    """Replace a configuration's largest values with notes if it is too long to store."""
    if not isinstance(config, dict):
        return config
    sizes = {name: len(json.dumps(value)) + len(name) for name, value in config.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sum(sizes.values()) <= CONFIG_CHARACTERS // 2:  # leaves room for separators and escapes
            break
        why = f"left out: it has {sizes[name]:,} characters"
        on_loss(f"config: {name} is {why}")
        config[name] = f"({why})"
        sizes[name] = len(config[name])
    return config
