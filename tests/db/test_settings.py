"""Settings from the environment."""

from typing import Literal, get_origin

import pytest
from annotated_types import Ge, Gt

from db.errors import Invalid
from db.settings import Settings

FIELDS = Settings.model_fields.items()
TYPED = [
    name
    for name, field in FIELDS
    if get_origin(field.annotation) is Literal or field.annotation in (bool, int, float)
]
BOUNDED = [name for name, field in FIELDS if any(isinstance(b, Ge | Gt) for b in field.metadata)]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "certainly not") for name in TYPED] + [(name, "-1") for name in BOUNDED],
)
def test_a_wrong_value_is_named_with_the_allowed_values(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the variable, its value and the allowed values."""
    monkeypatch.setenv(variable := f"HALFSTEP_{name.upper()}", value)
    with pytest.raises(Invalid) as caught:
        Settings.read()
    assert caught.value.errors[variable].startswith(f"{value!r}: allowed: ")
