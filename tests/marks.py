"""Marks of parametrized values, and tests that check many values."""

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import signature
from typing import Any

import pytest


def extended(values: Iterable[Any]) -> list[Any]:
    """Mark values for `make test-all` only; a value of several parameters is a tuple."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.extended)
        for value in values
    ]


def sampled(values: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Keep a sample of values in `make test`, and mark the others for `make test-all`."""
    return [value if value in sample else extended([value])[0] for value in values]


def looped(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Check all values in one test, whose error names each that fails.

    names, values: as of `parametrize`. It is for checks without side effects, which need no fixture
    for each value.
    """
    parameters = names.split(", ")
    rows = [value if len(parameters) > 1 else [value] for value in values]

    def decorate(check: Callable[..., None]) -> Any:
        @wraps(check)
        def check_all(**fixtures: Any) -> None:
            errors = []
            for row in rows:
                given = dict(zip(parameters, row, strict=True))
                try:
                    check(**fixtures, **given)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {given}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} values fail", errors)

        own = signature(check)
        others = [each for each in own.parameters.values() if each.name not in parameters]
        check_all.__signature__ = own.replace(parameters=others)  # type: ignore[attr-defined]
        return check_all

    return decorate
