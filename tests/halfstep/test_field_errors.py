"""Error messages with the allowed values of a field."""

import enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from halfstep.field_errors import reason
from tests.marks import looped


class Kind(enum.Enum):
    """An enum of two values."""

    A = "a"
    B = "b"


class Form(BaseModel, extra="forbid"):
    """A form with each kind of field in our models."""

    count: Annotated[int, Field(ge=1, le=2147483647)] = 1
    rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    finite: FiniteFloat = 0.0
    is_on: bool = False
    name: Annotated[str, Field(min_length=2, max_length=3, pattern="^a")] = "ab"
    tags: Annotated[list[str], Field(min_length=1, max_length=2)] = ["a"]
    values: dict[str, int] = {}
    mode: Literal["x", "y"] = "x"
    kind: Kind = Kind.A


@looped(
    "field, value, allowed",
    [
        *(("count", value, "a whole number") for value in ("x", 1.5, [])),
        ("count", 0, "at least 1"),
        ("count", 2**31, "at most 2147483647"),
        ("count", "9" * 5000, "a whole number with fewer digits"),
        *(("rate", value, "a number") for value in ("x", None)),
        ("rate", 0, "more than 0.0"),
        ("rate", 0.5, "less than 0.5"),
        ("finite", "nan", "a finite number"),
        *(("is_on", value, "true or false") for value in ("perhaps", [])),
        ("name", "a", "2 or more characters"),
        ("name", "abcd", "at most 3 characters"),
        ("name", "bc", "text that matches ^a"),
        ("name", 3, "text"),
        ("tags", "a", "a list"),
        ("tags", [], "1 or more entries"),
        ("tags", ["a"] * 3, "at most 2 entries"),
        ("values", 3, "an object"),
        ("mode", "z", "'x' or 'y'"),
        ("kind", "c", "'a' or 'b'"),
    ],
)
def test_an_error_says_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    """An error states the allowed values in our words, not the library's."""
    with pytest.raises(ValidationError) as raised:
        Form.model_validate({field: value})
    [error] = raised.value.errors()
    assert reason(error) == f"allowed: {allowed}"


def test_an_unknown_field_is_named_so() -> None:
    """An unknown field is reported as such, and other errors keep the library's message."""
    with pytest.raises(ValidationError) as raised:
        Form.model_validate({"nme": "ab"})
    assert [reason(error) for error in raised.value.errors()] == ["unknown field"]
    with pytest.raises(ValidationError) as raised:
        Form.model_validate("text")
    [error] = raised.value.errors()
    assert reason(error) == error["msg"]
