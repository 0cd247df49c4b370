"""The form of a command: converts form fields to a submission and back.

The row of a placeholder has its type, value, and bounds or choices. Values that cannot be parsed
stay text, are shown unchanged, and are rejected like any other invalid value.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import FormData

from app.submission.config_schema import Property
from app.submission.forms import input_text
from app.sweeps import search_space
from halfstep.cli import command_line

#: Labels of the JSON Schema types.
KINDS = {
    "number": "number",
    "integer": "whole number",
    "string": "text",
    "choice": "choice",
    "boolean": "true or false",
}
TEXTS = ("line", "folder", "git", "commit", "venv")
#: Inputs of a row; their names begin with "parameter.lr.".
PARTS = ("kind", "value", "minimum", "maximum", "choices")


@dataclass(frozen=True)
class Row:
    """One placeholder as typed."""

    name: str
    kind: str = "string"
    value: str = ""
    minimum: str = ""
    maximum: str = ""
    choices: str = ""
    error: str = ""
    is_value_wrong: bool = False  # the error is of the value, not of its rules


@dataclass(frozen=True)
class CommandForm:
    """The values of the form."""

    texts: dict[str, str] = field(default_factory=dict)  # by field
    variables: str = ""
    secrets: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    patch: str = ""  # in base64, which keeps each byte of it in a browser


def form_of(command: Mapping[str, Any], config: Mapping[str, object]) -> CommandForm:
    """Return the form of an existing command."""
    rows = []
    for name, rules in command["parameters"].items():
        kind = "choice" if "enum" in rules else rules["type"]
        minimum, maximum = (input_text(rules.get(end)) for end in ("minimum", "maximum"))
        choices = ", ".join(rules.get("enum", ()))
        value = input_text(config.get(name, rules.get("default")))
        rows.append(Row(name, kind, value, minimum, maximum, choices))
    variables = "\n".join(f"{name}={value}" for name, value in command["variables"].items())
    texts = {name: command[name] for name in TEXTS}
    patch = b64encode(command.get("patch", "").encode()).decode()
    return CommandForm(texts, variables, tuple(command["secrets"]), tuple(rows), patch)


def read_form(posted: FormData, errors: Mapping[str, str]) -> CommandForm:
    """Return the posted form, with a row for each placeholder of its line."""
    texts = {name: _text(posted, f"command.{name}") for name in TEXTS}
    rows = []
    for name in _placeholders(texts["line"]):
        parts = {part: _text(posted, f"parameter.{name}.{part}") for part in PARTS}
        parts["kind"] = parts["kind"] if parts["kind"] in KINDS else "string"
        paths = (f"command.parameters.{name}", f"config.{name}", f"space.{name}")
        error = next((errors[path] for path in paths if path in errors), "")
        is_value_wrong = paths[0] not in errors
        rows.append(Row(name, **parts, error=error, is_value_wrong=is_value_wrong))
    secrets = tuple(map(str, posted.getlist("command.secrets")))
    variables, patch = _text(posted, "command.variables"), str(posted.get("command.patch", ""))
    return CommandForm(texts, variables, secrets, tuple(rows), patch)


def parse_submission(form: CommandForm) -> tuple[dict[str, Any], dict[str, object], dict[str, str]]:
    """Return the command, its configuration, and parse errors by path."""
    errors, variables = {}, {}
    for line in filter(None, map(str.strip, form.variables.splitlines())):
        name, equals, value = line.partition("=")
        if not equals:
            errors["command.variables"] = f"{line[:100]!r} is not valid; allowed: NAME=value"
        variables[name.strip()] = value.strip()
    config, parameters = {}, {}
    for row in form.rows:
        parameters[row.name], config[row.name] = _parameter(row), _value(row)
        for end in ("minimum", "maximum"):
            if isinstance(bound := parameters[row.name].get(end), str):
                del parameters[row.name][end]
                text = f"its {end} is {bound[:100]!r}; allowed: a number"
                errors[f"command.parameters.{row.name}"] = text
    command = {**form.texts, "variables": variables, "secrets": list(form.secrets)}
    try:
        command["patch"] = b64decode(form.patch, validate=True).decode()
    except ValueError:
        errors["command.patch"] = "it is damaged; allowed: base64, as this page sent it"
    return command | {"parameters": parameters}, config, errors


def parse_search(
    form: CommandForm,
) -> tuple[dict[str, object], dict[str, object], dict[str, Any], dict[str, str]]:
    """Return a sweep's command, common configuration, search space, and parse errors."""
    command, config, errors = parse_submission(form)
    space = {
        row.name: row.value
        for row in form.rows
        if search_space.is_search(
            Property(row.name, "", command["parameters"][row.name]), row.value
        )
    }
    config = {name: value for name, value in config.items() if name not in space}
    return command, config, space, errors


def _parameter(row: Row) -> dict[str, object]:
    stated: dict[str, object] = {"type": "string" if row.kind == "choice" else row.kind}
    if row.kind == "choice":
        stated["enum"] = [text.strip() for text in row.choices.split(",") if text.strip()]
    if row.kind in ("number", "integer"):
        ends = {"minimum": row.minimum, "maximum": row.maximum}
        stated |= {end: _number(text) for end, text in ends.items() if text}
    return stated


def _value(row: Row) -> object:
    if row.kind == "boolean":
        return {"true": True, "false": False}.get(row.value.lower(), row.value)
    if row.kind in ("number", "integer"):
        return _number(row.value)
    return row.value


def _number(text: str) -> int | float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _placeholders(line: str) -> list[str]:
    try:
        return command_line.placeholders(line)[:100]
    except ValueError:
        return []


def _text(posted: FormData, name: str) -> str:
    return str(posted.get(name, "")).strip()
