"""Flattening and merging of nested dictionaries."""

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[Any, object], separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings to keys such as "val.accuracy"; empty ones are left out."""
    flattened: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = flat(value, separator)
            flattened |= {f"{name}{separator}{key}": item for key, item in inner.items()}
        else:
            flattened[str(name)] = value
    return flattened


def merge(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration with changes merged in, recursively."""
    both = dict(config)
    for name, value in changes.items():
        inner = both.get(name)
        is_group = isinstance(inner, Mapping) and isinstance(value, Mapping)
        both[name] = merge(inner, value) if is_group else value  # type: ignore[arg-type]
    return both
