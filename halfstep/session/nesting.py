"""Flattening and merging of nested dictionaries."""

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested mappings to keys such as "val.accuracy"; empty ones are left out."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}.{name}" if path else str(name)
        flattened |= flat(value, key) if isinstance(value, Mapping) else {key: value}
    return flattened


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with changes merged in, recursively."""
    both = dict(config)
    for name, value in changes.items():
        inner = both.get(name)
        is_group = isinstance(inner, Mapping) and isinstance(value, Mapping)
        both[name] = merged(inner, value) if is_group else value  # type: ignore[arg-type]
    return both
