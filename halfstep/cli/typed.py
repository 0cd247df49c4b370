"""Shared parts of commands: help, parsing of settings, output, exit codes."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from halfstep.client import ENDED, Client

#: Of a command that waits for a run's end. 1: the server refused; 2: typed wrongly; 130: Ctrl-C.
EXIT_CODES = {"finished": 0, "failed": 3, "cancelled": 4}
LEARNED_NOTHING = 5
EXITS = (
    "the exit code is 0 if it finished, 3 if it failed, 4 if it was cancelled, 5 if it finished "
    "with a loss that is not finite, or with all its steps skipped"
)


class Parser(argparse.ArgumentParser):
    """Reads words; where they ask for JSON, what is wrong with them is told so too."""

    _words: Sequence[str] = ()

    def parse_args(self, words: Sequence[str] | None) -> argparse.Namespace:  # type: ignore[override]
        """Read what was typed; None: to this process."""
        self._words = sys.argv[1:] if words is None else words
        options = super().parse_args(self._words)
        for action in self._actions:  # words that are left to others these will look at
            if action.nargs != argparse.REMAINDER:
                self._check(action, getattr(options, action.dest, None))
        return options

    def _check(self, action: argparse.Action, value: Any) -> None:
        """Refuse bytes that no text has; a path may have them."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                wrong = f"{os.fsencode(text)!r} is not allowed; allowed: UTF-8"
                self.error(str(argparse.ArgumentError(action, wrong)))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        if "--json" in self._words:
            self.exit(2, json.dumps({"error": message}) + "\n")
        super().error(message)


def parser_of(name: str, command: Any, more: str = "") -> argparse.ArgumentParser:
    """Return what reads a command's words. more: for its help."""
    server = "The server is HALFSTEP_URL and the token HALFSTEP_TOKEN, else as `halfstep login` has"
    parser = Parser(
        prog=f"halfstep {name}",
        description=command.__doc__,
        epilog=". ".join(filter(None, [more, f"{server} kept them."])),
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    return parser


def carry_out(
    name: str,
    group: Callable[..., None],
    commands: Mapping[str, Callable[[list[str]], None]],
    words: list[str],
) -> None:
    """Carry out the command of a group that the words begin with: `halfstep NAME COMMAND …`."""
    parser = Parser(prog=f"halfstep {name}", description=group.__doc__)
    explained = f"`halfstep {name} COMMAND --help` explains it"
    parser.add_argument("command", choices=commands, help=explained)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    # Not as argparse gives them, which would keep the first "--" for itself.
    commands[options.command](words[words.index(options.command) + 1 :])


def act(
    name: str,
    command: Callable[..., None],
    asked: Callable[[Client, int], dict[str, Any]],
    words: list[str],
) -> None:
    """Carry out a command that asks one thing of one run, `halfstep NAME RUN`, and tell the run."""
    parser = parser_of(name, command)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        tell(asked(client, options.run), options)


def add_submission(parser: argparse.ArgumentParser) -> None:
    """Let a command's words configure a run, and name it."""
    add_configuration(parser)
    parser.add_argument("--name", default="")
    parser.add_argument("--wait", action="store_true", help=f"until it is over; {EXITS}")


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Let a command's words say what runs are submitted with."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32", "fp8"])
    parser.add_argument("--project", help="else the first that you may submit to")
    parser.add_argument("--tag", action="append", default=[], dest="tags")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Let a command's words say the command line that runs are."""
    command = parser.add_argument_group("a command, in place of a recipe")
    command.add_argument("--command", metavar="LINE", help="no shell sees it")
    command.add_argument("--param", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--folder", default="", help="on the worker, or in the repository")
    command.add_argument("--git", default="", metavar="URL", help="https://… or file://…")
    command.add_argument("--commit", default="", help="with --git: a hash")
    command.add_argument("--venv", default="", help="virtual environment on the worker")
    command.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--secret", action="append", default=[], metavar="NAME")


def command_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was typed of a command line, as the client takes it."""
    parameters = pairs(parser, "--param", options.param)
    return {
        "line": options.command,
        "parameters": {name: value_of(text) for name, text in parameters},
        "folder": options.folder,
        "git": options.git,
        "commit": options.commit,
        "venv": options.venv,
        "variables": dict(pairs(parser, "--env", options.env)),
        "secrets": options.secret,
    }


def configuration(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was typed of a configuration."""
    config = assigned(parser, options.fields)
    if options.precision:
        config["precision"] = options.precision
    return config


def assigned(parser: argparse.ArgumentParser, assignments: Iterable[str]) -> dict[str, Any]:
    """Return fields as `--set group.field=value` has them, nested."""
    config: dict[str, Any] = {}
    for path, text in pairs(parser, "--set", assignments, "FIELD=VALUE"):
        *groups, field = path.split(".")
        group = config
        for name in groups:
            group = group.setdefault(name, {})
        group[field] = value_of(text)
    return config


def pairs(
    parser: argparse.ArgumentParser,
    option: str,
    assignments: Iterable[str],
    allowed: str = "NAME=VALUE",
) -> list[tuple[str, str]]:
    """Return what an option that may be repeated assigned to which names."""
    typed = []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            parser.error(f"{option} {assignment}: allowed is {allowed}")
        typed.append((name, value))
    return typed


def folder_of(text: str) -> Path:
    """Return the path of a folder that is there, or can be made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; allowed: a folder")
    return path


def heard(parser: argparse.ArgumentParser, read: Callable[[], str]) -> str:
    """Return what is read from stdin."""
    try:
        text = read()
    except UnicodeDecodeError:
        parser.error("stdin has bytes that are not allowed; allowed: UTF-8")
    if not is_text(text):  # as Python reads it where no locale is set
        parser.error("stdin has bytes that are not allowed; allowed: UTF-8")
    return text


def is_text(text: str) -> bool:
    """Tell whether UTF-8 has it: Python keeps other bytes that were typed as half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def value_of(text: str) -> Any:
    """Return what was typed for a value: JSON if it is some, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def tell_queued(client: Client, run: dict[str, Any], options: argparse.Namespace) -> None:
    """Tell of a run that was queued; wait for its end if that was typed, and exit as it ended."""
    tell(run, options)
    if options.wait:
        ended = client.wait(run["id"], told=warn)
        tell(ended, options)
        sys.exit(exit_code(ended))


def exit_code(run: Mapping[str, Any]) -> int:
    """Return what tells a shell how a run has ended."""
    is_lost = run.get("ending") in ("diverged", "unapplied")  # which earlier servers do not tell
    return LEARNED_NOTHING if is_lost else EXIT_CODES[run["status"]]


def warn(text: str) -> None:
    """Say on stderr what is no result, and no end either."""
    print(f"halfstep: {text}", file=sys.stderr, flush=True)


def tell(run: dict[str, Any], options: argparse.Namespace) -> None:
    """Print where a run is, on a line."""
    print(json.dumps(run) if options.json else _line(run), flush=True)


def _line(run: dict[str, Any]) -> str:
    reason = _reason(run) if run["status"] in ENDED else run["waiting"]
    why = f"  ({reason})" if reason else ""
    total = f" of {run['steps_total']:,}" if run["steps_total"] else ""
    done = f"{run['step']:,}{total} steps, {run['skipped']:,} skipped"
    state = run.get("ending") or run["status"]  # by the words that the filter has
    return f"{run['id']:>6}  {state:<11} {run['name']}  {done}{why}"


def _reason(run: dict[str, Any]) -> str:
    """Say why a run failed: as its history has it, else what its error ends with."""
    if run["status"] != "failed":
        return ""
    told = [change["reason"] for change in run.get("statuses", [])]
    lines = [line.strip() for line in (run["error"] or "").splitlines() if line.strip()]
    return str(next(filter(None, [*told[-1:], *lines[-1:]]), ""))
