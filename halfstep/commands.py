"""What a person types about runs, at any machine that reaches the server."""

import argparse
import json
import sys
import time
from getpass import getpass
from pathlib import Path
from typing import Any

from halfstep import credentials
from halfstep.client import ENDED, URL, Client
from halfstep.credentials import Credentials
from halfstep.ingest import Ingest
from halfstep.upload import run_folders
from halfstep.upload import upload as send_run

#: Of a command that waits for a run's end. 1: the server refused; 2: typed wrongly.
EXIT_CODES = {"finished": 0, "failed": 3, "cancelled": 4}
EXITS = "the exit code is 0 if it finished, 3 if it failed, 4 if it was cancelled"


def runs(words: list[str]) -> None:
    """List runs of a server, newest first."""
    parser = _parser("runs", runs)
    parser.add_argument("text", nargs="?", default="", help="in name, recipe, tags or owner")
    parser.add_argument("--status", default="", help='one, or "active"')
    parser.add_argument("--limit", type=int, default=20)
    options = parser.parse_args(words)
    with Client() as client:
        for found in client.runs(options.text, status=options.status, limit=options.limit):
            _tell(found, options)


def show(words: list[str]) -> None:
    """Show a run as JSON: where it is, its configuration and its history."""
    parser = _parser("show", show)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        print(json.dumps(client.run(options.run), indent=None if options.json else 2))


def submit(words: list[str]) -> None:
    """Queue a run: `submit digits --set training.steps=400`, or a command: `submit --command
    'python train.py --lr {lr}' --param lr=0.1`.
    """
    parser = _parser("submit", submit)
    parser.add_argument("recipe", nargs="?", default="")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32"])
    command = parser.add_argument_group("a command, in place of a recipe")
    command.add_argument("--command", metavar="LINE", help="no shell sees it")
    command.add_argument("--param", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--folder", default="", help="on the worker, or in the repository")
    command.add_argument("--git", default="", metavar="URL", help="https://… or file://…")
    command.add_argument("--commit", default="", help="with --git: a hash")
    command.add_argument("--venv", default="", help="virtual environment on the worker")
    command.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--secret", action="append", default=[], metavar="NAME")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--name", default="")
    parser.add_argument("--tag", action="append", default=[], dest="tags")
    parser.add_argument("--wait", action="store_true", help=f"until it is over; {EXITS}")
    options = parser.parse_args(words)
    if bool(options.recipe) == bool(options.command):
        parser.error("allowed is one of a recipe and --command")
    further = {"name": options.name, "tags": options.tags, "devices_per_node": options.devices}
    with Client() as client:
        if options.command:
            queued = _submit_command(client, parser, options, further)
        else:
            config: dict[str, Any] = {}
            for path, value in _assigned(parser, "--set", options.fields):
                _put(config, path.split("."), value)
            if options.precision:
                config["precision"] = options.precision
            queued = client.submit(options.recipe, config, **further)
        _tell(queued, options)
        if options.wait:
            ended = client.wait(queued["id"])
            _tell(ended, options)
            sys.exit(EXIT_CODES[ended["status"]])


def _submit_command(
    client: Client,
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    further: dict[str, Any],
) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for name, value in _assigned(parser, "--param", options.param):
        _put(parameters, [name], value)
    return client.submit_command(
        options.command,
        parameters,
        folder=options.folder,
        git=options.git,
        commit=options.commit,
        venv=options.venv,
        variables=dict(_assigned(parser, "--env", options.env)),
        secrets=options.secret,
        **further,
    )


def _assigned(
    parser: argparse.ArgumentParser, option: str, assignments: list[str]
) -> list[tuple[str, str]]:
    pairs = []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            allowed = "FIELD=VALUE" if option == "--set" else "NAME=VALUE"
            parser.error(f"{option} {assignment}: allowed is {allowed}")
        pairs.append((name, value))
    return pairs


def cancel(words: list[str]) -> None:
    """End a run; one that trains leaves a checkpoint first."""
    parser = _parser("cancel", cancel)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        _tell(client.cancel(options.run), options)


def follow(words: list[str]) -> None:
    """Tell of a run whenever it has changed, until it is over; the exit code says how it ended."""
    parser = _parser("follow", follow, EXITS)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        for told in client.follow(options.run):
            _tell(told, options)
    sys.exit(EXIT_CODES[told["status"]])


def log(words: list[str]) -> None:
    """Print what a run has written to its log."""
    parser = _parser("log", log)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        for line in client.log(options.run):
            print(json.dumps(line) if options.json else line["text"])


def download(words: list[str]) -> None:
    """Download a checkpoint of a run, and compare its SHA-256."""
    parser = _parser("download", download)
    parser.add_argument("run", type=int)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--step", type=int, help="the newest if not told")
    parser.add_argument("--kind", default="checkpoint", help="or weights, or weights.<module>")
    options = parser.parse_args(words)
    with Client() as client:
        step, kind = options.step, options.kind
        path = client.download(options.run, options.folder, step=step, kind=kind)
        print(json.dumps({"path": str(path)}) if options.json else path)


RUN = {
    "submit": submit,
    "list": runs,
    "show": show,
    "follow": follow,
    "log": log,
    "cancel": cancel,
    "download": download,
}


def run(words: list[str]) -> None:
    """Submit, list, show, follow, cancel or download runs, or read one's log."""
    parser = argparse.ArgumentParser(prog="halfstep run", description=run.__doc__)
    parser.add_argument("command", choices=RUN, help="`halfstep run COMMAND --help` explains it")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    RUN[options.command](options.words)


def login(words: list[str]) -> None:
    """Keep a server's address and a token for it, in a file that you alone can read."""
    parser = _parser("login", login)
    parser.add_argument("url", nargs="?", default=URL, help=f"of the server; {URL} if not told")
    options = parser.parse_args(words)
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"url is {options.url!r}; allowed: http://… or https://…")
    # Never an argument: whoever lists processes, or reads the shell's history, would see it.
    asked = f"Token of {options.url}, from its account page: "
    token = (getpass(asked) if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if not token:
        parser.error("there is no token: type it, or send it as standard input")
    path = credentials.store(Credentials(options.url.rstrip("/"), token))
    kept = {"url": options.url, "path": str(path)}
    print(json.dumps(kept) if options.json else f"The token of {options.url} is in {path}")


def upload(words: list[str]) -> None:
    """Send watched runs from their folders: half of one, or what was sent before, does no harm."""
    parser = _parser("upload", upload)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs, or above")
    parser.add_argument("--checkpoints", action="store_true", help="all of them, not as watched")
    parser.add_argument("--delete", action="store_true", help="the spools of what is over and sent")
    options = parser.parse_args(words)
    if missing := [folder for folder in options.folders if not folder.is_dir()]:
        parser.error(f"{missing[0]} is no folder")
    found = [run for folder in options.folders for run in run_folders(folder.absolute())]
    if not found:
        parser.error(f"there is no run in {', '.join(map(str, options.folders))}")
    server = credentials.known()
    if server is None:
        parser.error("no server is known: `halfstep login`, or set HALFSTEP_URL and HALFSTEP_TOKEN")
    with Ingest(server) as ingest:
        for folder in found:
            sent = send_run(
                folder,
                ingest,
                lambda text: print(f"halfstep: {text}", file=sys.stderr),
                time.sleep,
                with_checkpoints=options.checkpoints,
                delete=options.delete,
            )
            if options.json:
                print(json.dumps({"folder": str(folder), **sent._asdict()}), flush=True)
            else:
                more = "" if sent.is_over else "; it has not ended yet"
                print(f"{folder}: {sent.page or 'not sent'}{more}", flush=True)


COMMANDS = {
    each.__name__: each for each in (cancel, download, login, run, runs, show, submit, upload)
}


def _parser(name: str, command: Any, more: str = "") -> argparse.ArgumentParser:
    server = "The server is HALFSTEP_URL and the token HALFSTEP_TOKEN, else as `halfstep login` has"
    parser = argparse.ArgumentParser(
        prog=f"halfstep {name}",
        description=command.__doc__,
        epilog=". ".join(filter(None, [more, f"{server} kept them."])),
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    return parser


def _tell(run: dict[str, Any], options: argparse.Namespace) -> None:
    print(json.dumps(run) if options.json else _line(run), flush=True)


def _put(config: dict[str, Any], path: list[str], text: str) -> None:
    """Set a field of a nested configuration: JSON if it is some, else the text itself."""
    for name in path[:-1]:
        config = config.setdefault(name, {})
    try:
        config[path[-1]] = json.loads(text)
    except ValueError:
        config[path[-1]] = text


def _line(run: dict[str, Any]) -> str:
    waiting = f"  ({run['waiting']})" if run["waiting"] and run["status"] not in ENDED else ""
    total = f" of {run['steps_total']:,}" if run["steps_total"] else ""
    done = f"{run['step']:,}{total} steps, {run['skipped']:,} skipped"
    return f"{run['id']:>6}  {run['status']:<11} {run['name']}  {done}{waiting}"
