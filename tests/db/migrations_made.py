"""Shared helpers of the tests of migrations."""

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Float,
    Integer,
    LargeBinary,
)


def a_value(column: Any) -> Any:
    """Return a value of a column's type, or the first row's key."""
    if isinstance(column.type, Boolean):
        return True
    if isinstance(column.type, Integer):
        return 1
    if isinstance(column.type, Float):
        return 1.0
    if isinstance(column.type, JSON):
        return []
    return b"x" if isinstance(column.type, LargeBinary) else "x"
