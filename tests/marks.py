"""Marks of parametrized values."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def extended(values: Iterable[Any]) -> list[Any]:
    """Leave values to `make test-all`; a value of several parameters is a tuple."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.extended)
        for value in values
    ]


def sampled(values: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Keep the values of a sample in `make test`, and leave the others to `make test-all`."""
    return [value if value in sample else extended([value])[0] for value in values]
