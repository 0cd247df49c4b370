"""What a person types about runs, at any machine that reaches the server."""

import argparse
import json
import sys
from typing import Any

from halfstep.client import ENDED, Client


def runs(words: list[str]) -> None:
    """List runs of a server, newest first."""
    parser = _parser("runs", runs)
    parser.add_argument("text", nargs="?", default="", help="in name, recipe, tags or owner")
    parser.add_argument("--status", default="", help='one, or "active"')
    parser.add_argument("--limit", type=int, default=20)
    options = parser.parse_args(words)
    with Client() as client:
        for run in client.runs(options.text, status=options.status, limit=options.limit):
            print(_line(run))


def show(words: list[str]) -> None:
    """Show a run as JSON: where it is, its configuration and its history."""
    parser = _parser("show", show)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        print(json.dumps(client.run(options.run), indent=2))


def submit(words: list[str]) -> None:
    """Queue a run: `submit digits --set training.steps=400`."""
    parser = _parser("submit", submit)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--name", default="")
    parser.add_argument("--tag", action="append", default=[], dest="tags")
    parser.add_argument("--wait", action="store_true", help="until it is over; 1 if it failed")
    options = parser.parse_args(words)
    config: dict[str, Any] = {}
    for assignment in options.fields:
        path, equals, value = assignment.partition("=")
        if not equals:
            parser.error(f"--set {assignment}: allowed is FIELD=VALUE")
        _put(config, path.split("."), value)
    if options.precision:
        config["precision"] = options.precision
    with Client() as client:
        run = client.submit(options.recipe, config, name=options.name, tags=options.tags)
        print(_line(run), flush=True)
        if options.wait:
            run = client.wait(run["id"])
            print(_line(run))
            sys.exit(run["status"] != "finished")


def cancel(words: list[str]) -> None:
    """End a run; one that trains leaves a checkpoint first."""
    parser = _parser("cancel", cancel)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        print(_line(client.cancel(options.run)))


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
        print(client.download(options.run, options.folder, step=step, kind=kind))


COMMANDS = {each.__name__: each for each in (cancel, download, runs, show, submit)}


def _parser(name: str, command: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"halfstep {name}",
        description=command.__doc__,
        epilog="The server is HALFSTEP_URL, or this machine's; the token is HALFSTEP_TOKEN.",
    )


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
