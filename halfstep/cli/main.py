"""The `halfstep` command.

Other packages add commands by entry points of the group `halfstep.commands`: a callable that takes
the arguments after its name, and whose docstring's first line is its help. Server, worker and
recipes are such commands.
"""

import argparse
import errno
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points

from halfstep import __version__

GROUP = "halfstep.commands"
#: Those of halfstep.cli.commands.
OWN = (
    "alert",
    "cancel",
    "download",
    "export",
    "import",
    "login",
    "mcp",
    "note",
    "preset",
    "projects",
    "retention",
    "run",
    "runs",
    "show",
    "submit",
    "sweep",
    "upload",
    "workers",
)
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
    "storage",
    "up",
    "user",
    "worker",
)
#: Of these a traceback says more than a line: they serve, or run a person's own code.
WITH_TRACEBACK = ("placer", "recipe", "server", "up", "worker")


def main(words: list[str] | None = None) -> None:
    """Run the command that was typed."""
    words = sys.argv[1:] if words is None else words
    try:
        _carry_out(words)
    except SystemExit as ended:  # each command's way to say in a sentence what went wrong
        if "--json" not in words or not isinstance(ended.code, str):
            raise
        sys.stderr.write(json.dumps({"error": ended.code.removeprefix("halfstep: ")}) + "\n")
        sys.exit(1)


def _carry_out(words: list[str]) -> None:
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if words and words[0] in installed:
        try:
            command = installed[words[0]].load()
        except ModuleNotFoundError as error:
            sys.exit(f"halfstep: `{words[0]}` {_lacks(error)}")
        if words[0] in SERVICE and words[0] not in WITH_TRACEBACK:
            with _files_spoken():
                command(words[1:])
        else:
            command(words[1:])
    elif words and words[0] in OWN:
        with _files_spoken():
            _run(words[0], words[1:])
    elif words and words[0] in SERVICE:
        sys.exit(
            f"halfstep: `{words[0]}` is a command of the service, which is not installed here: "
            "in a clone of Halfstep, pip install ./halfstep '.[worker]'"
        )
    else:
        _parser(installed).parse_args(words or ["--help"])


def _run(name: str, words: list[str]) -> None:
    from halfstep.api_client.credentials import Unreadable
    from halfstep.api_client.responses import (
        ApiError,  # with an HTTP client, which the others need not wait for
    )
    from halfstep.cli.commands import COMMANDS

    try:
        COMMANDS[name](words)
    except (ApiError, Unreadable) as error:
        sys.exit(f"halfstep: {error}")
    except KeyboardInterrupt:  # of who waits; the run goes on
        sys.exit(128 + signal.SIGINT)


@contextmanager
def _files_spoken() -> Iterator[None]:
    """Say in a line which file cannot be read or written, and why."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # while it can still be told that nothing takes it
    except BrokenPipeError:  # `halfstep run log 1 | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # of what is open nobody has the name
        named = error.filename or ("output" if is_full else None)
        sys.exit(f"halfstep: {f'{named}: ' if named else ''}{error.strerror or error}")


def _parser(installed: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    """Return what explains the commands; it loads them all, which takes a second."""
    parser = argparse.ArgumentParser(
        prog="halfstep", description="Mixed-precision training, watched. `halfstep COMMAND --help`."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    from halfstep.cli.commands import COMMANDS

    helps = {name: _first_line(command.__doc__) for name, command in COMMANDS.items()}
    helps |= {name: _help(point) for name, point in installed.items()}
    for name, text in sorted(helps.items()):
        commands.add_parser(name, help=text)
    return parser


def _help(point: EntryPoint) -> str:
    try:
        return _first_line(point.load().__doc__)
    except ModuleNotFoundError as error:
        return _first_line(_lacks(error))
    except Exception as error:  # somebody's broken package must not hide the others
        return _first_line(f"cannot be loaded: {type(error).__name__}: {error}")


def _first_line(text: str | None) -> str:
    return str(text).strip().partition("\n")[0].replace("%", "%%")


def _lacks(error: ModuleNotFoundError) -> str:
    """Return a hint if a command needs an extra that is not installed."""
    return f"needs {error.name}, which is not installed here"


if __name__ == "__main__":
    main()
