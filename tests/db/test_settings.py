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
    """The error has the variable, its value and the allowed values."""
    monkeypatch.setenv(variable := f"HALFSTEP_{name.upper()}", value)
    with pytest.raises(Invalid) as caught:
        Settings.read()
    assert caught.value.errors[variable].startswith(f"{value!r}: allowed: ")


@pytest.mark.parametrize(
    ("its_database", "its_storage", "days"),
    [
        ("", "", 7),
        ("", "s3://bucket/prefix", 0),
        ("", "file://{data}", 0),
        ("", "file://{data}-other", 0),
        ("sqlite:///{data}/halfstep.db?timeout=60", "", 7),
        ("sqlite:///{data}/copy.db", "", 0),
        ("sqlite+pysqlite:///{data}/../data/halfstep.db", "", 7),
        ("sqlite:///{data}/db/halfstep.db", "", 0),
        ("sqlite:///halfstep.db", "", 0),
        ("sqlite:///{data}-other/halfstep.db", "", 0),
        ("sqlite:///{data}-other/halfstep.db", "s3://bucket", 0),
        ("sqlite:///file:{data}/halfstep.db?uri=true", "", 0),
        ("sqlite://", "", 0),
        ("postgresql://localhost/halfstep", "", 0),
        ("postgresql://localhost/halfstep", "s3://bucket", 0),
    ],
)
def test_steps_are_frozen_by_default_only_beside_the_database(
    its_database: str, its_storage: str, days: float, tmp_path: Path
) -> None:
    """Both in one folder: elsewhere there may be no backup, or a bucket has two databases."""
    data = tmp_path / "data"
    urls = {"database_url": its_database, "storage_url": its_storage}
    given = {name: url.format(data=data) for name, url in urls.items()}
    assert Settings(data=data, **given).freeze_days == days
    for chosen in (0.0, 3.0):
        assert Settings(data=data, freeze_after_days=chosen, **given).freeze_days == chosen


@pytest.mark.parametrize("name", ["halfstep.db", "steps"])
def test_steps_stay_in_the_database_by_default_if_a_link_leads_out_of_the_folder(
    name: str, tmp_path: Path
) -> None:
    """The folder of the steps or the file of the database may be on another disk."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "link").symlink_to(data)  # of the whole folder
    url = f"sqlite:///{tmp_path / 'link' / 'halfstep.db'}"
    for settings in (Settings(data=data), Settings(data=tmp_path / "link", database_url=url)):
        assert settings.freeze_days == 7
    (data / name).symlink_to(tmp_path / "elsewhere")
    assert Settings(data=data).freeze_days == 0


@pytest.mark.parametrize(("earlier", "name"), variables.RENAMED.items())
def test_a_renamed_variable_is_an_error_with_its_new_name(
    earlier: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored, HALFSTEP_BIN_DAYS would erase runs, and HALFSTEP_WALLS give no sandbox."""
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
    """One of another tool is allowed by its name or its beginning."""
    monkeypatch.setenv("HALFSTEP_TRASHDAYS", "90")
    monkeypatch.setenv("HALFSTEP_LAB_ROOM", "7")
    with pytest.raises(Invalid) as caught:
        Settings.read()
    assert set(caught.value.errors) == {"HALFSTEP_TRASHDAYS", "HALFSTEP_LAB_ROOM"}
    assert "did you mean HALFSTEP_TRASH_DAYS?" in caught.value.errors["HALFSTEP_TRASHDAYS"]
    monkeypatch.setenv("HALFSTEP_OTHER_VARIABLES", "HALFSTEP_LAB_*, HALFSTEP_TRASHDAYS")
    Settings.read()


def test_variables_of_services_in_kubernetes_are_allowed() -> None:
    """It sets them in each pod for each service, here those of one named halfstep-server."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    environment = {f"HALFSTEP_SERVER_{name}": "10.0.0.1" for name in names}
    assert set(variables.problems(environment, [])) == set(environment)
    assert not variables.problems(environment | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [])


def test_each_variable_that_is_read_is_known() -> None:
    """No process ends for a variable that another part of Halfstep reads or sets."""
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
