"""Marks of parametrized values."""

from collections.abc import Iterable
from typing import Any

import pytest


def extended(values: Iterable[Any]) -> list[Any]:
    """Leave values to `make test-all`; a value of several parameters is a tuple."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.extended)
        for value in values
    ]
