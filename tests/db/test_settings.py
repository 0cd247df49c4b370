"""Settings from the environment."""

from pathlib import Path
from typing import Literal, get_origin

import pytest
from annotated_types import Ge, Gt

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
