"""Submitted commands: their fields, and the JSON Schema of their parameters."""

import math
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from app.http.parameters import find_outsized, flaw, flaws
from app.submission import config_schema
from app.submission.config_schema import Schema
from db.access import secrets
from halfstep.cli import command_line, command_sources
from halfstep.session import queued_run
from halfstep.telemetry.events import SOURCE_BYTES
from halfstep.telemetry.plain_json import JsonObject

MOST_PARAMETERS, MOST_VARIABLES, MOST_CHOICES = 50, 100, 100
LINE_CHARACTERS, VALUE_CHARACTERS, NAME_CHARACTERS = 10_000, 10_000, 1_000
COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
#: Environment variables that the worker sets.
SET_BY_US = {queued_run.RUN, queued_run.ATTEMPT, queued_run.FOLDER}
SET_BY_US |= {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HALFSTEP_PARENT_PID"}


class Parameter(BaseModel):
    """Type and bounds of a placeholder's value."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["number", "integer", "string", "boolean"] = "string"
    enum: Annotated[list[str] | None, Field(description="Choices of a string")] = None
    minimum: float | None = None
    maximum: float | None = None
    default: str | int | float | bool | None = None
    description: str = ""


class Command(BaseModel):
    """A command line that a worker runs if it allows commands; without a shell."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    line: Annotated[str, Field(description="With placeholders: python train.py --lr {lr}")]
    folder: str = ""
    """On the worker, absolute; with git, within the repository"""
    git: Annotated[str, Field(description="https://… or file://…, cloned by the worker")] = ""
    commit: Annotated[str, Field(description="With git: a hash, or its first digits")] = ""
    patch: Annotated[str, Field(max_length=SOURCE_BYTES)] = ""
    """With git: changes of the commit, by git diff"""
    venv: str = ""
    """Virtual environment on the worker; empty: the worker's own"""
    variables: dict[str, str] = {}
    """Environment variables, visible to all"""
    secrets: list[str] = []
    """Names of secrets, which are passed as environment variables"""
    sources: Annotated[
        dict[
            Annotated[str, Field(max_length=NAME_CHARACTERS)],
            Annotated[str, Field(pattern="^[0-9a-f]{64}$")],
        ],
        Field(max_length=command_sources.MOST_FILES),
    ] = {}
    """SHA-256 of its code, by path within the folder; the run names changes"""
    parameters: dict[str, Parameter] = {}
    """By placeholder; by default inferred from its value in config"""


def schema(parameters: JsonObject) -> Schema:
    """Return the JSON Schema of a command's configuration."""
    return {"type": "object", "additionalProperties": False, "properties": parameters}


def as_submitted(stored: JsonObject) -> Command:
    """Convert a stored command to a submission."""
    parameters = {
        name: {field: value for field, value in rules.items() if field != "title"}
        for name, rules in stored["parameters"].items()
    }
    return Command.model_validate(stored | {"parameters": parameters})


def default_name(line: str) -> str:
    """Return the default name: script, module or program."""
    words = command_line.words(line)
    scripts = [word for word in words if word.endswith(".py")]
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    [name, *_] = [*scripts, *module, words[0]]
    return name.rpartition("/")[2].removesuffix(".py")[:100] or "command"


def check(
    session: Session, command: Command, config: JsonObject, devices: int
) -> tuple[dict[str, Any], dict[str, object], dict[str, str]]:
    """Return the command to store, all parameter values, and errors by path."""
    stored = command.model_dump(exclude={"parameters"}) | {"parameters": {}}
    submitted = {"command": command.model_dump(exclude={"patch"}), "config": config}
    if errors := find_outsized(submitted) or flaws(submitted):
        return stored, config, errors
    errors = _mistakes(session, command, devices)
    if "command.line" in errors:
        return stored, config, errors
    names = command_line.placeholders(command.line)
    for name in command.parameters.keys() - set(names):
        errors[f"command.parameters.{name}"] = f"the line has no placeholder {{{name}}}"
    for name in names:
        parameter = command.parameters.get(name) or _infer(config.get(name))
        stored["parameters"][name] = _property(name, parameter)
        errors |= _mistakes_of_parameter(name, parameter)
    if errors:
        return stored, config, errors
    whole = schema(stored["parameters"])
    config = config_schema.with_defaults(whole, config)
    wrong = config_schema.mistakes(whole, config)
    for name in wrong.keys() - set(names):
        known = ", ".join(f"{{{known}}}" for known in names) or "none"
        wrong[name] = f"the line has no placeholder {{{name}}}; allowed: {known}"
    for name in wrong.keys() & set(names):
        if config.get(name) is None:
            wrong[name] = f"the placeholder {{{name}}} needs a value or a default"
        elif config[name] == "":
            [field] = (prop for prop in config_schema.properties(whole) if prop.path == name)
            wrong[name] = f"{{{name}}} is empty; enter {field.allowed}"
    if not wrong:
        config = config_schema.parse(whole, config)
        wrong = find_outsized(config)
    return stored, config, {f"config.{path}": text for path, text in wrong.items()}


def _mistakes(session: Session, command: Command, devices: int) -> dict[str, str]:
    errors = {}
    try:
        if len(command.line) > LINE_CHARACTERS:
            text = f"it has {len(command.line):,} characters; allowed: at most {LINE_CHARACTERS:,}"
            raise ValueError(text)
        names = command_line.placeholders(command.line)
        if len(names) > MOST_PARAMETERS:
            text = f"it has {len(names)} placeholders; allowed: at most {MOST_PARAMETERS}"
            raise ValueError(text)
        if long := [name for name in names if len(name) > command_line.NAME_CHARACTERS]:
            most = command_line.NAME_CHARACTERS
            raise ValueError(f"{long[0][:100]} is long; allowed: names of at most {most}")
        if devices > 1 and (failure_kind := command_line.ranks_fault(command.line)):
            raise ValueError(failure_kind)
    except ValueError as error:
        errors["command.line"] = str(error)
    return errors | _place_mistakes(command) | _environment_mistakes(session, command)


def _place_mistakes(command: Command) -> dict[str, str]:
    errors = {}
    folder, git, commit = command.folder, command.git, command.commit
    if git and not _is_repository(git):
        allowed = "https://… or file://…, without a user or a password"
        errors["command.git"] = f"it is {git[:200]!r}; allowed: {allowed}"
    if git and not COMMIT.fullmatch(commit):
        allowed = "a commit's hash, or at least 7 of its first digits"
        errors["command.commit"] = f"it is {commit[:100]!r}; allowed: {allowed}"
    if command.patch and not git:
        errors["command.patch"] = "it has no effect without git, the repository"
    elif wrong := flaw(command.patch):
        errors["command.patch"] = wrong
    if commit and not git:
        errors["command.commit"] = f"{commit[:100]!r} has no effect without git, the repository"
    if git and (folder.startswith("/") or ".." in folder.split("/")):
        allowed = "a folder of the repository, such as src"
        errors["command.folder"] = f"it is {folder[:200]!r}; allowed: {allowed}"
    if folder and not git and not folder.startswith("/"):
        errors["command.folder"] = f"it is {folder[:200]!r}; allowed: an absolute path, /home/me/it"
    if command.venv and not command.venv.startswith("/"):
        text = f"it is {command.venv[:200]!r}; allowed: an absolute path, /home/me/.venv"
        errors["command.venv"] = text
    return errors


def _is_repository(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    is_whole = bool(parts.netloc) if parts.scheme == "https" else parts.path.startswith("/")
    is_plain = url.isprintable() and " " not in url and "@" not in parts.netloc
    return parts.scheme in ("https", "file") and is_whole and is_plain


def _environment_mistakes(session: Session, command: Command) -> dict[str, str]:
    errors = {}
    if len(command.variables) > MOST_VARIABLES:
        text = f"there are {len(command.variables)}; allowed: at most {MOST_VARIABLES}"
        errors["command.variables"] = text
    for name, value in command.variables.items():
        path = f"command.variables.{name[:100]}"
        if not VARIABLE.fullmatch(name):
            allowed = "letters, digits and _, not a digit first, at most 100"
            errors[path] = f"its name is {name[:100]!r}; allowed: {allowed}"
        elif name in SET_BY_US:
            errors[path] = "the worker sets it; allowed: other names"
        elif name in command.secrets:
            errors[path] = "it is also the name of a secret; remove one of the two"
        elif len(value) > VALUE_CHARACTERS:
            errors[path] = f"it has {len(value):,} characters; allowed: {VALUE_CHARACTERS:,}"
    known = secrets.names(session) if command.secrets else []
    if unknown := [name for name in command.secrets if name not in known]:
        allowed = ", ".join(known)[:500] or "none"
        errors["command.secrets"] = f"there is no secret {unknown[0][:100]!r}; allowed: {allowed}"
    return errors


def _infer(value: object) -> Parameter:
    if isinstance(value, bool):
        return Parameter(type="boolean")
    return Parameter(type="number" if isinstance(value, int | float) else "string")


def _property(name: str, parameter: Parameter) -> Schema:
    """Return a placeholder's JSON Schema."""
    stated = parameter.model_dump(exclude_none=True, exclude={"description"})
    return {"title": name, "description": parameter.description, **stated}


def _mistakes_of_parameter(name: str, parameter: Parameter) -> dict[str, str]:
    path = f"command.parameters.{name}"
    bounds = [bound for bound in (parameter.minimum, parameter.maximum) if bound is not None]
    if bounds and parameter.type not in ("number", "integer"):
        return {path: f"a {parameter.type} has no bounds; allowed: for numbers and integers"}
    if not all(map(math.isfinite, bounds)) or bounds != sorted(bounds):
        return {path: f"its bounds are {bounds}; allowed: finite numbers, minimum first"}
    choices = parameter.enum
    if choices is not None and parameter.type != "string":
        return {path: f"a {parameter.type} has no choices; allowed: for strings"}
    if choices is not None and not 1 <= len(set(choices)) == len(choices) <= MOST_CHOICES:
        return {path: f"it has {len(choices)} choices; allowed: 1 to {MOST_CHOICES}, all different"}
    if parameter.default is None:
        return {}
    wrong = config_schema.mistakes(
        schema({name: _property(name, parameter)}), {name: parameter.default}
    )
    return {path: f"its default: {'; '.join(wrong.values())}"} if wrong else {}
