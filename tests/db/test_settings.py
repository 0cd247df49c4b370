"""Settings from the environment."""

import re
from pathlib import Path
from typing import Literal, get_origin

import pytest
from annotated_types import Ge, Gt

from db import variables
from db.errors import Invalid
from db.settings import Settings

FIELDS = Settings.model_fields.items()
SIMPLE = (bool, int, float, float | None)
TYPED = [
    name
    for name, field in FIELDS
    if get_origin(field.annotation) is Literal or field.annotation in SIMPLE
]
BOUNDED = [name for name, field in FIELDS if any(isinstance(b, Ge | Gt) for b in field.metadata)]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "certainly not") for name in TYPED] + [(name, "-1") for name in BOUNDED],
)
def test_a_wrong_value_is_named_with_the_allowed_values(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for an invalid setting has the variable, its value and the allowed values."""
    monkeypatch.setenv(variable := f"HALFSTEP_{name.upper()}", value)
    with pytest.raises(Invalid) as caught:
        Settings.read()
    assert caught.value.errors[variable].startswith(f"{value!r}: allowed: ")


def test_a_retired_setting_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retired setting is refused with the reason, so that an operator can remove it."""
    monkeypatch.setenv("HALFSTEP_FREEZE_AFTER_DAYS", "7")
    with pytest.raises(Invalid, match=r"FREEZE_AFTER_DAYS: retired: .* blocks.* Unset it"):
        Settings.read()


@pytest.mark.parametrize(("earlier", "name"), variables.RENAMED.items())
def test_a_renamed_variable_is_an_error_with_its_new_name(
    earlier: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed variable is an error with its new name, since ignoring it could erase runs or
    disable the sandbox.
    """
    assert name.lower() in Settings.model_fields
    assert earlier.lower() not in Settings.model_fields
    monkeypatch.setenv(f"HALFSTEP_{earlier}", "90")
    with pytest.raises(Invalid) as caught:
        Settings.read()
    renamed = f"renamed to HALFSTEP_{name}; set that instead"
    assert caught.value.errors == {f"HALFSTEP_{earlier}": renamed}


def test_an_unknown_variable_is_an_error_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown variable is an error with the nearest name; other tools' ones can be allowed."""
    monkeypatch.setenv("HALFSTEP_TRASHDAYS", "90")
    monkeypatch.setenv("HALFSTEP_LAB_ROOM", "7")
    with pytest.raises(Invalid) as caught:
        Settings.read()
    assert set(caught.value.errors) == {"HALFSTEP_TRASHDAYS", "HALFSTEP_LAB_ROOM"}
    assert "did you mean HALFSTEP_TRASH_DAYS?" in caught.value.errors["HALFSTEP_TRASHDAYS"]
    monkeypatch.setenv("HALFSTEP_OTHER_VARIABLES", "HALFSTEP_LAB_*, HALFSTEP_TRASHDAYS")
    Settings.read()


def test_variables_of_services_in_kubernetes_are_allowed() -> None:
    """Variables that Kubernetes sets for a service named halfstep-server are allowed."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    environment = {f"HALFSTEP_SERVER_{name}": "10.0.0.1" for name in names}
    assert set(variables.problems(environment, [])) == set(environment)
    assert not variables.problems(environment | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [])


def test_each_variable_that_is_read_is_known() -> None:
    """Each HALFSTEP_* variable in the sources is known."""
    root = Path(__file__).parents[2]
    sources = [
        path.read_text()
        for folder in ("app", "db", "halfstep", "trainer", "worker")
        for path in (root / folder).rglob("*.py")
    ]
    names = set(re.findall(r"[\"'`](HALFSTEP_[A-Z0-9_]+[A-Z0-9])[\"'`=]", "".join(sources)))
    assert len(names) > 20
    read = dict.fromkeys(names, "")
    assert not variables.problems(read, Settings.model_fields)
