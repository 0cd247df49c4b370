"""The `halfstep` command.

Other packages add commands by entry points of the group `halfstep.commands`: a typer.Typer, or a
callable that takes the arguments after its name and whose docstring's first line is its help.
Server, worker and recipes are such commands. A command is imported when it is used.
"""

import io
import json
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from halfstep.cli.application import Group, PassThrough, first_line, message_of
from halfstep.version import __version__

GROUP = "halfstep.commands"
#: Where each command of the client is: its module, and for a shortcut the command of its group.
CLIENT: Mapping[str, tuple[str, str]] = {
    "agent": ("halfstep.cli.commands.agent", ""),
    "alert": ("halfstep.cli.commands.alert", ""),
    "artifact": ("halfstep.cli.commands.artifact", ""),
    "cancel": ("halfstep.cli.commands.run", "cancel"),
    "check": ("halfstep.cli.commands.check", ""),
    "download": ("halfstep.cli.commands.run", "download"),
    "export": ("halfstep.exporting.commands", ""),
    "import": ("halfstep.importing.commands", ""),
    "login": ("halfstep.cli.commands.login", ""),
    "mcp": ("halfstep.cli.commands.mcp", ""),
    "note": ("halfstep.cli.commands.note", ""),
    "preset": ("halfstep.cli.commands.preset", ""),
    "projects": ("halfstep.cli.commands.project", ""),
    "query": ("halfstep.cli.commands.query", ""),
    "report": ("halfstep.cli.commands.report", ""),
    "retention": ("halfstep.cli.commands.retention", ""),
    "run": ("halfstep.cli.commands.run", ""),
    "runs": ("halfstep.cli.commands.run", "list"),
    "submit": ("halfstep.cli.commands.run", "submit"),
    "sweep": ("halfstep.cli.commands.sweep", ""),
    "top": ("halfstep.cli.commands.top", ""),
    "upload": ("halfstep.cli.commands.upload", ""),
    "workers": ("halfstep.cli.commands.worker", ""),
}
#: Those that the service adds, to be named where it is not installed.
SERVICE = (
    "backup",
    "cluster",
    "link",
    "migrate",
    "placer",
    "rebuild",
    "recipe",
    "restore",
    "server",
    "settings",
    "show",
    "storage",
    "up",
    "user",
    "worker",
)


def main(words: list[str] | None = None) -> None:
    """Run the command that was typed; raise SystemExit if its exit code is not 0."""
    words = sys.argv[1:] if words is None else words
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be UTF-8
    try:
        code = root().main(args=words or ["--help"], prog_name="halfstep", standalone_mode=False)
    except typer.TyperException as error:
        _reject(error, as_json="--json" in words)
    except typer.Abort:  # Ctrl-C or the end of input at a question
        sys.exit(1)
    except SystemExit as ended:  # each command's way to end with a sentence
        if "--json" not in words or not isinstance(ended.code, str):
            raise
        sys.stderr.write(json.dumps({"error": ended.code.removeprefix("halfstep: ")}) + "\n")
        sys.exit(1)
    if code:
        sys.exit(code)


@cache
def root() -> Any:
    """Return the group of all commands."""
    return typer.main.get_group(APP)


def command(name: str) -> Any:
    """Return the command of a name, or None."""
    return root().get_command(None, name)


def _reject(error: typer.TyperException, *, as_json: bool) -> NoReturn:
    """Report a usage error, and exit."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
        sys.stderr.write(error.format_message().lstrip())  # typer has printed it
    elif as_json:
        sys.stderr.write(json.dumps({"error": message_of(error)}) + "\n")
    else:
        hint = f" (`{context.command_path} --help`)" if context is not None else ""
        sys.stderr.write(f"halfstep: {message_of(error)}{hint}\n")
    sys.exit(getattr(error, "exit_code", 1))


class Root(Group):
    """Imports a command when it is used; `--help` imports all of them, which takes a second."""

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of the commands that are installed."""
        return sorted({*CLIENT, *self._installed})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        if cmd_name not in self.commands and (command := self._load(cmd_name)) is not None:
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def _load(self, name: str) -> Any:
        if name in CLIENT:
            module, shortcut = CLIENT[name]
            command: Any = typer.main.get_command(import_module(module).app)
            return command.commands[shortcut] if shortcut else command
        if name in self._installed:
            return _load(self._installed[name])
        return PassThrough(name, _not_installed(name), "") if name in SERVICE else None

    @cached_property
    def _installed(self) -> dict[str, object]:
        from importlib.metadata import entry_points  # 30 ms, which the client's commands save

        return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: Any) -> object:
    """Return the command of an entry point; one that cannot be loaded reports why when run."""
    try:
        loaded = point.load()
    except Exception as error:  # another package's mistake must not hide the other commands
        if _is_outdated(point, error):  # its sources were updated without a new installation
            text = f"cannot be loaded ({error}): {_reinstall(point)}"
        elif isinstance(error, ModuleNotFoundError):  # an extra is not installed
            text = f"needs {error.name}, which is not installed here"
        else:
            text = f"cannot be loaded: {type(error).__name__}: {error}"
            return PassThrough(point.name, _raising(error), text)
        return PassThrough(point.name, _ending(f"halfstep: `{point.name}` {text}"), text)
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    return PassThrough(point.name, loaded, first_line(loaded.__doc__))


def _is_outdated(point: Any, error: Exception) -> bool:
    """Return whether the module or attribute that an entry point names is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{point.module}.".startswith(f"{error.name}.")
    return isinstance(error, AttributeError) and point.module in sys.modules  # it was imported


def _reinstall(point: Any) -> str:
    package = point.dist.name if point.dist else "its package"
    # In the folder of `python -m`, metadata of an earlier build hides those of the installation.
    metadata = f"{package.replace('-', '_')}.egg-info"
    if point.dist and (built := point.dist.locate_file(metadata)).is_dir():
        return f"{built} does not match its sources; delete it"
    how = "run `make up`, or pip install" if point.name in SERVICE else "install"
    return f"the installation of {package} does not match its sources; {how} it again"


def _ending(text: str) -> Any:
    return lambda words: sys.exit(text)


def _raising(error: Exception) -> Any:
    def run(words: list[str]) -> NoReturn:
        raise error

    return run


def _not_installed(name: str) -> Any:
    text = f"halfstep: `{name}` is a command of the service, which is not installed: "
    return _ending(f"{text}in a clone of Halfstep, pip install ./halfstep '.[worker]'")


APP = typer.Typer(
    cls=Root,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@APP.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Mixed-precision training, watched. `halfstep COMMAND --help` explains a command."""


if __name__ == "__main__":
    main()
