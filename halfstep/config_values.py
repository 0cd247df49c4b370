"""Converts what scripts use as a configuration into JSON, value by value.

numpy's and torch's scalars become numbers, enums their values, paths, dtypes, devices, functions
and classes texts, dataclasses, namespaces, models of pydantic and attrs, and configurations of
OmegaConf objects. A value that cannot be converted becomes a note, and costs nothing else.
"""

import dataclasses
import enum
import json
import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any

from halfstep.events import CONFIG_CHARACTERS, LARGEST_WHOLE, cleaned, shown

#: Of objects and lists within each other, entries of one, and characters of a text.
MAX_DEPTH, MAX_ITEMS, MAX_TEXT, MAX_NAME = 9, 1000, 2000, 200
MISSING = "???"  # as OmegaConf writes a value that is yet to be given
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

OnLoss = Callable[[str], None]


def as_config(value: Any, on_loss: OnLoss = lambda _: None) -> Any:
    """Return a configuration as JSON; a note in place of each value that JSON cannot hold.

    on_loss: called with a line for each of those.
    """
    return _fitting(_Converter(on_loss).convert(value, "", ()), on_loss)


class _Converter:
    def __init__(self, on_loss: OnLoss) -> None:
        self._on_loss = on_loss

    def convert(self, value: Any, path: str, parents: tuple[int, ...]) -> Any:
        """Convert a value. path: of it; parents: the ids of what it lies in."""
        try:
            return self._convert(value, path, parents)
        except Exception as error:  # a proxy, a property, an interpolation of the script's
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return self._lost(path, f"unreadable: {cleaned(text)[:MAX_NAME]}")

    def _convert(self, value: Any, path: str, parents: tuple[int, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            is_plain = isinstance(value.value, bool | int | float | str)
            return self._convert(value.value if is_plain else value.name, path, parents)
        if isinstance(value, str | bytes | os.PathLike):
            return self._text(value, path)
        if (number := _number(value)) is not None:
            return number
        if id(value) in parents:
            return self._lost(path, "a cycle: it contains itself")
        inner = (*parents, id(value))
        entries = _entries(value)
        items = None if entries is not None else _items(value)
        if (entries is not None or items is not None) and len(parents) >= MAX_DEPTH:
            return self._lost(path, f"nested deeper than {MAX_DEPTH} levels")
        if entries is not None:
            return self._object(entries, path, inner)
        if items is not None:
            return self._list(items, path, inner)
        return self._text(_words(value), path)

    def _text(self, value: Any, path: str) -> str:
        raw = os.fspath(value) if isinstance(value, os.PathLike) else value
        text = raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else str(raw)
        text = cleaned(text)
        if len(text) <= MAX_TEXT:
            return text
        self._lost(path, f"cut to {MAX_TEXT:,} of {len(text):,} characters")
        return f"{text[:MAX_TEXT]}…"

    def _object(
        self, entries: Iterator[tuple[Any, Callable[[], Any]]], path: str, parents: tuple[int, ...]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, get in islice(entries, MAX_ITEMS):
            name = cleaned(str(key.name if isinstance(key, enum.Enum) else key))[:MAX_NAME]
            below = f"{path}.{name}" if path else name
            found[name] = self._got(get, below, parents)
        if next(entries, None) is not None:
            found["…"] = self._lost(path, f"more than {MAX_ITEMS:,} entries, the rest is left out")
        return found

    def _list(
        self, items: Iterator[Callable[[], Any]], path: str, parents: tuple[int, ...]
    ) -> list[Any]:
        found = [
            self._got(get, f"{path}.{number}", parents)
            for number, get in enumerate(islice(items, MAX_ITEMS))
        ]
        if next(items, None) is not None:
            found.append(self._lost(path, f"more than {MAX_ITEMS:,} entries, the rest is left out"))
        return found

    def _got(self, get: Callable[[], Any], path: str, parents: tuple[int, ...]) -> Any:
        try:
            value = get()
        except Exception as error:
            if type(error).__name__ == "MissingMandatoryValue":
                self._lost(path, "missing")
                return MISSING
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return self._lost(path, f"unreadable: {cleaned(text)[:MAX_NAME]}")
        return self.convert(value, path, parents)

    def _lost(self, path: str, why: str) -> str:
        self._on_loss(f"config: {path or 'it'} is {why}")
        return f"({why})"


def _number(value: Any) -> int | float | str | None:
    """Return what is one number as Python has it, at its own precision; None of all else."""
    if isinstance(value, type) or getattr(value, "ndim", 0):
        return None
    if hasattr(value, "detach") and hasattr(value, "dtype"):  # torch
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        value = value.numpy()[()]
    elif getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # an array of numpy
        value = value[()] if hasattr(value, "__getitem__") else value.item()
    if isinstance(value, float):
        return float(value)
    if hasattr(value, "dtype") and hasattr(value, "item"):
        kind = value.dtype.kind  # float32 0.1 is 0.1, not 0.10000000149011612
        value = float(str(value)) if kind == "f" else value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value) if abs(value) <= LARGEST_WHOLE else shown(int(value))
    return float(value) if isinstance(value, numbers.Real | Decimal) else None


def _entries(value: Any) -> Iterator[tuple[Any, Callable[[], Any]]] | None:
    """Return the names within an object, each with what reads its value; None of what is none."""
    if isinstance(value, Mapping):
        return ((key, partial(value.__getitem__, key)) for key in value)
    if isinstance(value, type) or callable(value):
        return None
    names = _field_names(value)
    return None if names is None else ((name, partial(getattr, value, name)) for name in names)


def _field_names(value: Any) -> list[str] | None:
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


def _items(value: Any) -> Iterator[Callable[[], Any]] | None:
    """Return what reads each entry of a list, a set or an array, in order; None of what is none."""
    if isinstance(value, type):
        return None
    if hasattr(value, "detach") and hasattr(value, "dtype"):
        value = value.detach().cpu()
    if getattr(value, "ndim", 0) and hasattr(value, "__getitem__"):
        return (partial(value.__getitem__, number) for number in range(len(value)))
    if isinstance(value, Set):
        ordered: Any = value
        with suppress(TypeError):
            ordered = sorted(value)
        return (partial(lambda entry: entry, entry) for entry in ordered)
    if isinstance(value, Sequence):
        return (partial(value.__getitem__, number) for number in range(len(value)))
    return None


def _words(value: Any) -> str:
    """Return a text of any other object, the same in each process."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        module = getattr(value, "__module__", None)
        prefix = "" if module in (None, "builtins", "__main__") else f"{module}."
        return f"{prefix}{value.__qualname__}"
    return ADDRESS.sub("", str(value))


def _fitting(config: Any, on_loss: OnLoss) -> Any:
    """Return a configuration without its largest values if it is too long to be kept."""
    if not isinstance(config, dict):
        return config
    sizes = {name: len(json.dumps(value)) + len(name) for name, value in config.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sum(sizes.values()) <= CONFIG_CHARACTERS // 2:  # its separators and escapes come on top
            break
        why = f"left out, for it has {sizes[name]:,} characters"
        on_loss(f"config: {name} is {why}")
        config[name] = f"({why})"
        sizes[name] = len(config[name])
    return config
