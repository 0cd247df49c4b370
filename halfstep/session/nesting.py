"""Nested values by the paths to them."""

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """Return what is nested as "val.accuracy"; a mapping without entries is left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}.{name}" if path else str(name)
        found |= flat(value, key) if isinstance(value, Mapping) else {key: value}
    return found


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with changes, group by group."""
    both = dict(config)
    for name, value in changes.items():
        inner = both.get(name)
        is_group = isinstance(inner, Mapping) and isinstance(value, Mapping)
        both[name] = merged(inner, value) if is_group else value  # type: ignore[arg-type]
    return both
