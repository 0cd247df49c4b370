"""`halfstep sweep COMMAND`."""

import argparse
import json
import sys
from typing import Any

from halfstep.cli.typed import (
    add_command,
    carry_out,
    command_of,
    configuration,
    pairs,
    parser_of,
    value_of,
    warn,
)
from halfstep.client import Client

#: Of who waits for a sweep's end.
EXIT_CODES = {"finished": 0, "failed": 3, "cancelled": 4}


def begin(words: list[str]) -> None:
    """Begin one: `sweep begin digits --search recipe.learning_rate='0.1, 0.01' --at-once 2`, or of
    a command: `sweep begin --command 'python train.py --lr {lr}' --search lr='0.1, 0.01'`.
    """
    parser = parser_of("sweep begin", begin)
    parser.add_argument("recipe", nargs="?", default="")
    add_search(parser)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32", "fp8"])
    parser.add_argument("--kind", default="grid", choices=["grid", "random", "tpe", "hyperband"])
    parser.add_argument("--metric", default="loss", help="what is compared: its last value")
    parser.add_argument("--goal", default="", choices=["minimise", "maximise"])
    parser.add_argument("--runs", type=int, help="in all; every point of a grid, else 20")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="")
    parser.add_argument("--project", help="else the first that you may submit to")
    parser.add_argument("--tag", action="append", default=[], dest="tags")
    parser.add_argument("--wait", action="store_true", help="until it is over")
    add_command(parser)
    options = parser.parse_args(words)
    if bool(options.recipe) == bool(options.command):
        parser.error("allowed is one of a recipe and --command")
    if options.command and (options.fields or options.precision):
        parser.error("--set and --precision are of a recipe; allowed with --command is --param")
    names = ("kind", "metric", "goal", "runs", "at_once", "seed", "name", "tags", "project")
    further = {name: getattr(options, name) for name in names}
    with Client() as client:
        if options.command:
            command = command_of(parser, options)
            begun = client.sweep_command(space=searched(parser, options), **command, **further)
        else:
            config = configuration(parser, options)
            begun = client.begin_sweep(options.recipe, searched(parser, options), config, **further)
        tell(begun, options)
        if options.wait:
            ended = client.wait_for_sweep(begun["id"], told=warn)
            tell(ended, options)
            sys.exit(EXIT_CODES[ended["status"]])


def sweeps(words: list[str]) -> None:
    """List sweeps, newest first."""
    parser = parser_of("sweep list", sweeps)
    parser.add_argument("--limit", type=int, default=20)
    options = parser.parse_args(words)
    with Client() as client:
        for found in client.sweeps(limit=options.limit):
            tell(found, options)


def show(words: list[str]) -> None:
    """Show a sweep's runs with settings and values, the best first."""
    parser = parser_of("sweep show", show)
    parser.add_argument("sweep", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        tell(client.sweep(options.sweep), options)
        for trial in client.trials(options.sweep):
            print(json.dumps(trial) if options.json else _trial_line(trial))


def extend(words: list[str]) -> None:
    """Add runs to a sweep, or values to a grid: `sweep extend 1 --search training.seed=4..6`."""
    parser = parser_of("sweep extend", extend)
    parser.add_argument("sweep", type=int)
    parser.add_argument("--runs", type=int, help="how many more")
    add_search(parser)
    options = parser.parse_args(words)
    with Client() as client:
        space = searched(parser, options) or None
        tell(client.extend_sweep(options.sweep, runs=options.runs, space=space), options)


def move(words: list[str]) -> None:
    """Let a sweep and all of its runs go to another project, if you maintain both."""
    parser = parser_of("sweep move", move)
    parser.add_argument("sweep", type=int)
    parser.add_argument("--project", required=True, help="'' is the one that there always is")
    options = parser.parse_args(words)
    with Client() as client:
        tell(client.move_sweep(options.sweep, project=options.project), options)


def _steering(name: str, method: str, text: str) -> Any:
    def steer(words: list[str]) -> None:
        parser = parser_of(f"sweep {name}", steer)
        parser.add_argument("sweep", type=int)
        options = parser.parse_args(words)
        with Client() as client:
            tell(getattr(client, method)(options.sweep), options)

    steer.__doc__ = text
    return steer


SWEEP = {
    "begin": begin,
    "list": sweeps,
    "show": show,
    "extend": extend,
    "move": move,
    "pause": _steering("pause", "pause_sweep", "Submit no more runs; those under way go on."),
    "resume": _steering("resume", "resume_sweep", "Go on with a paused or failed sweep."),
    "cancel": _steering("cancel", "cancel_sweep", "End a sweep and its runs that wait or train."),
}


def sweep(words: list[str]) -> None:
    """Begin, list, show, extend, move, pause, resume or cancel sweeps."""
    carry_out("sweep", sweep, SWEEP, words)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Let a command's words say what is searched."""
    text = "0.1, 0.01; 1..9 step 2; uniform(a, b), loguniform(a, b), integers(a, b); a JSON list"
    parser.add_argument("--search", action="append", default=[], metavar="FIELD=WHAT", help=text)


def searched(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was typed of a space."""
    space = {}
    for path, text in pairs(parser, "--search", options.search, "FIELD=WHAT"):
        value = value_of(text)
        space[path] = value if isinstance(value, list) else text
    return space


def tell(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print where a sweep is, on a line."""
    if options.json:
        print(json.dumps(found), flush=True)
        return
    best = "" if found["best"] is None else f", best {found['metric']} {found['best']:.6g}"
    count = found["complete"] + found["pruned"] + found["failed"]
    ended = f"{count} of {found['runs_total']} runs ended"
    why = f"  ({found['error']})" if found["error"] else ""
    print(f"{found['id']:>6}  {found['status']:<9} {found['name']}  {ended}{best}{why}", flush=True)


def _trial_line(trial: dict[str, Any]) -> str:
    value = "–" if trial["value"] is None else f"{trial['value']:.6g}"
    return f"{trial['run_id']:>6}  {trial['status']:<11} {value:<12} {trial['name']}"
