"""Arguments and options that several commands share, and what reads their values."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from halfstep.cli import command_line
from halfstep.telemetry.plain_json import JsonObject, is_unicode

Precision: TypeAlias = Literal["fp16", "bf16", "fp32", "fp8"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line")]
RunId = Annotated[int, typer.Argument(metavar="RUN", help="Number of the run")]
RunIds = Annotated[list[int], typer.Argument(metavar="RUN", help="Numbers of the runs")]
SweepId = Annotated[int, typer.Argument(metavar="SWEEP", help="Number of the sweep")]

Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a configuration field; FIELD=off where it may be empty; repeatable",
    ),
]
PrecisionOption = Annotated[
    Precision | None, typer.Option("--precision", help="Precision, short for --set precision=…")
]
Project = Annotated[
    str | None, typer.Option(help="Project; default: the first one that you may submit to")
]
SomeProject = Annotated[str | None, typer.Option(help="Project; '' is the default project")]
OtherProject = Annotated[str, typer.Option(help="Project to move to; '' is the default project")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Tag; repeatable")]
Preemptible = Annotated[
    bool,
    typer.Option("--preemptible", help="Let a waiting run of higher priority take its devices"),
]
Name = Annotated[str, typer.Option(help="Name; default: derived from the recipe or command")]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait for the end; the exit code reports the outcome")
]

MaxError = Annotated[
    float, typer.Option(min=0, max=10, help="Largest relative error of the gradient")
]
MinCosine = Annotated[
    float, typer.Option(min=-1, max=1, help="Smallest cosine similarity of the gradient")
]

#: Heading of the options of a command line.
COMMAND = "Command line to run instead of a recipe"
Line = Annotated[
    str,
    typer.Option(
        "--command",
        metavar="LINE",
        rich_help_panel=COMMAND,
        help="Command line instead of a recipe, with placeholders: 'python train.py --lr {lr}'; "
        "not run by a shell",
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        rich_help_panel=COMMAND,
        help="Value of a placeholder; repeatable",
    ),
]
Folder = Annotated[
    str,
    typer.Option(
        rich_help_panel=COMMAND,
        help="Working directory of the command, on the worker or in the repository",
    ),
]
Git = Annotated[
    str,
    typer.Option(
        metavar="URL", rich_help_panel=COMMAND, help="Repository to check out: https:// or file://"
    ),
]
Commit = Annotated[
    str,
    typer.Option(metavar="HASH", rich_help_panel=COMMAND, help="Commit to check out, with --git"),
]
Venv = Annotated[
    str,
    typer.Option(metavar="PATH", rich_help_panel=COMMAND, help="Virtual environment on the worker"),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME=VALUE",
        rich_help_panel=COMMAND,
        help="Environment variable; repeatable",
    ),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME",
        rich_help_panel=COMMAND,
        help="Secret of the server to pass on; repeatable",
    ),
]


def command_of(
    line: str,
    parameters: Sequence[str] | None,
    folder: str,
    git: str,
    commit: str,
    venv: str,
    variables: Sequence[str] | None,
    secrets: Sequence[str] | None,
    searched: Collection[str] = (),
) -> dict[str, Any]:
    """Return the options of a command line as keyword arguments of the client.

    searched: placeholders without a value.
    """
    values = {name: value_of(text) for name, text in pairs("--param", parameters or ())}
    with suppress(ValueError):  # the server says what is wrong with the line
        for name in command_line.placeholders(line):
            if name not in values and name not in searched:
                raise typer.BadParameter(f"{{{name}}} needs a value: --param {name}=VALUE")
    return {
        "line": line,
        "parameters": values,
        "folder": folder,
        "git": git,
        "commit": commit,
        "venv": venv,
        "variables": dict(pairs("--env", variables or ())),
        "secrets": list(secrets or ()),
    }


def configuration(fields: Iterable[str] | None, precision: str | None) -> dict[str, Any]:
    """Return a nested configuration of `--set group.field=value` and --precision."""
    config: JsonObject = {}
    for path, text in pairs("--set", fields or (), "FIELD=VALUE"):
        *groups, field = path.split(".")
        group = config
        for name in groups:
            group = group.setdefault(name, {})
            if not isinstance(group, dict):
                raise typer.BadParameter(f"--set {path}: {name} is already set to {group!r}")
        group[field] = value_of(text)
    return config | ({"precision": precision} if precision else {})


def pairs(
    option: str, assignments: Iterable[str], allowed: str = "NAME=VALUE"
) -> list[tuple[str, str]]:
    """Split the values of a repeatable option into names and values."""
    split = []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option} {assignment}: use {allowed}")
        split.append((name, value))
    return split


def value_of(text: str) -> object:
    """Return a value that was typed: JSON if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_folder(path: Path) -> None:
    """Reject a file where a folder is expected; one that does not exist is created later."""
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; allowed: a folder")


def read_text(read: Callable[[], str]) -> str:
    """Return text read from stdin; other bytes than UTF-8 are rejected."""
    try:
        text = read()
    except UnicodeDecodeError:
        text = "\udcff"
    if not is_unicode(text):  # as Python reads such bytes where no locale is set
        raise typer.BadParameter("stdin is not valid UTF-8")
    return text


def note_text(note: str | None) -> str | None:
    """Return the value of --note: "-" is read from stdin."""
    return read_text(sys.stdin.read) if note == "-" else note
