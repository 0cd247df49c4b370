"""`halfstep settings`: the values that are in effect on this machine, and where they come from."""

import os
import re
from typing import NamedTuple

from pydantic import SecretStr

from app.command_classes import command
from db import variables
from db.settings import Settings
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_list

HIDDEN = "(hidden)"
PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):[^@\s]+@")


class SettingRow(NamedTuple):
    """A setting as a user sees it: no secrets."""

    variable: str
    value: str
    source: str  # "environment" or "default"
    default: str


@command
def settings(as_json: AsJson = False) -> None:
    """List the settings in effect, their source and default; secrets are hidden."""
    print_list(
        [row._asdict() for row in rows(Settings.read())],
        ("Variable", "Value", "Source", "Default"),
        lambda row: tuple(row.values()),
        as_json=as_json,
    )


def rows(read: Settings) -> list[SettingRow]:
    """Return the settings, and the variables of scripts and recipes that are set."""
    environment = {name.upper(): value for name, value in os.environ.items()}
    listed = []
    for name, field in Settings.model_fields.items():
        variable = f"{variables.PREFIX}{name.upper()}"
        value = getattr(read, name)
        source = "environment" if variable in environment else "default"
        listed.append(SettingRow(variable, _text(value), source, _text(field.default)))
    for name in sorted(variables.OF_SCRIPTS):
        variable = f"{variables.PREFIX}{name}"
        if text := environment.get(variable):
            shown = HIDDEN if name == "TOKEN" else _text(text)
            listed.append(SettingRow(variable, shown, "environment", ""))
    return listed


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return HIDDEN if value.get_secret_value() else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "" if value is None else PASSWORD.sub(r"\1:***@", str(value))
