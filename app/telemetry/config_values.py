"""Fields of a run's configuration with the defaults of its recipe or command."""

from typing import Any

from pydantic import BaseModel
from sqlalchemy.orm import Session

from app.submission import command_lines, config_schema
from db.queue import workers
from db.tables import Run


class Setting(BaseModel):
    """A field with its value and default."""

    path: str
    title: str
    value: Any
    default: Any  # also null if it is unknown
    has_default: bool
    is_changed: bool


def settings_of(session: Session, run: Run) -> list[Setting]:
    """Return all settings; the defaults are unknown if no worker offers the recipe."""
    if run.command:
        schema = command_lines.schema(run.command["parameters"])
    else:
        schema = (workers.find_recipe(session, run.recipe) or {}).get("schema", {})
    fields = {field.path: field for field in config_schema.properties(schema)}
    values = config_schema.flat(run.whole_config)
    return [_setting(run, path, value, fields.get(path)) for path, value in values]


def _setting(run: Run, path: str, value: Any, field: config_schema.Property | None) -> Setting:
    # A command's parameter may have no default.
    has_default = field is not None and (run.command is None or "default" in field.schema)
    return Setting(
        path=path,
        title=field.title if field else path,
        value=value,
        default=field.default if field else None,
        has_default=has_default,
        is_changed=field is None or (has_default and bool(value != field.default)),
    )


def select_changed(settings: list[Setting]) -> list[Setting]:
    """Return the settings that are known to differ from their defaults."""
    return [setting for setting in settings if setting.has_default and setting.is_changed]
