"""Formatting of numbers as text."""

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep import number_formats
from tests.marks import looped

CASES = json.loads((Path(__file__).parents[1] / "number_formats.json").read_text())


@looped(
    "kind, value, text",
    [(kind, value, text) for kind, rows in CASES.items() for value, text in rows],
)
def test_numbers_are_formatted_as_in_the_browser(kind: str, value: Any, text: str) -> None:
    """Every number format gives the text in the table that the browser's tests share."""
    value = float(value) if isinstance(value, str) else value
    assert getattr(number_formats, kind)(value) == text


@pytest.mark.parametrize(("value", "text"), [(1, "1 step"), (0, "0 steps"), (2000, "2,000 steps")])
def test_quantities_have_their_noun(value: int, text: str) -> None:
    """A quantity has its noun, in the singular for 1 only."""
    assert number_formats.quantity(value, "step") == text


@looped(
    "value, text",
    [
        *((None, "null"), (True, "true"), ([], "[]"), ([1, "a"], '[1, "a"]')),
        *(
            (16777216.0, "16777216"),
            (0.1, "0.1"),
            (9.7795e-5, "9.7795e-5"),
            ("adamw", "adamw"),
            ({"a": None}, '{"a": null}'),
        ),
    ],
)
def test_values_of_a_configuration(value: Any, text: str) -> None:
    """Configuration values are formatted as JSON, and whole floats without a point."""
    assert number_formats.setting(value) == text
