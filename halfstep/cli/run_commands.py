"""Commands that read a run's numbers, and control it."""

import csv
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from halfstep.cli.typed import (
    act,
    add_submission,
    configuration,
    heard,
    parser_of,
    tell,
    tell_queued,
    warn,
)
from halfstep.client import Client
from halfstep.telemetry.spool import json_safe


def series(words: list[str]) -> None:
    """Print every step of a run, or every metric, as CSV; `--points 200` thins them out.

    flags: a sum of 1, skipped; 2, the loss is not finite; 4, the norm is beyond fp32; 256, the
    first optimizer skipped; 512, the second did; … Empty: NaN.
    """
    parser = parser_of("run series", series)
    parser.add_argument("run", type=int)
    parser.add_argument("--metrics", action="store_true", help="what the training logged beside")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int)
    parser.add_argument("--points", type=int, help="32 to 5000, with every extreme; else all")
    options = parser.parse_args(words)
    with Client() as client:
        read = client.metrics if options.metrics else client.series
        found = read(options.run, first=options.first, last=options.last, points=options.points)
    columns = {name: column.tolist() for name, column in found.columns().items()}
    written = csv.writer(sys.stdout, lineterminator="\n")
    if not options.json:
        written.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        if options.json:
            print(json.dumps(json_safe(dict(zip(columns, row, strict=True)))))
        else:
            written.writerow("" if math.isnan(value) else value for value in row)


def events(words: list[str]) -> None:
    """Print scaler events: skips with their culprits, growth and backoff."""
    parser = parser_of("run events", events)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        for event in client.events(options.run):
            print(json.dumps(event) if options.json else _event_line(event))


def findings(words: list[str]) -> None:
    """Print the findings of a run, the gravest first."""
    parser = parser_of("run findings", findings)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        for each in client.findings(options.run):
            print(json.dumps(each) if options.json else f"{each['title']}\n  {each['text']}")


def compare(words: list[str]) -> None:
    """Compare runs as CSV, a line per run: summary values and settings that differ."""
    parser = parser_of("run compare", compare)
    parser.add_argument("run", type=int, nargs="+")
    options = parser.parse_args(words)
    with Client() as client:
        found = client.compare(options.run)
    rows = [
        {"run": each["run"]["id"], "name": each["run"]["name"], "status": each["run"]["status"]}
        | {"step": each["run"]["step"], "skipped": each["run"]["skipped"]}
        | {name: figure["value"] for name, figure in each["figures"].items()}
        | {f"best {name}": figure["value"] for name, figure in each["best"].items()}
        | {path: values[place] for path, values in found["differences"].items()}
        for place, each in enumerate(found["runs"])
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    written = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    if not options.json:
        written.writeheader()
    for row in rows:
        if options.json:
            print(json.dumps(row))
        else:
            written.writerow(row)
    if found["missing"]:
        numbers = ", ".join(map(str, found["missing"]))
        print(f"left out, for they are not there: {numbers}", file=sys.stderr)


def scale(words: list[str]) -> None:
    """Set the loss scale of a running fp16 run from its next step on."""
    parser = parser_of("run scale", scale)
    parser.add_argument("run", type=int)
    parser.add_argument("scale", type=float)
    options = parser.parse_args(words)
    with Client() as client:
        asked = client.set_scale(options.run, options.scale)
    text = f"run {options.run} is asked for a loss scale of {options.scale:g}"
    print(json.dumps(asked) if options.json else text)


def fork(words: list[str]) -> None:
    """Queue a run that starts from another's checkpoint: `fork 1 --set training.steps=800`."""
    parser = parser_of("run fork", fork)
    parser.add_argument("run", type=int)
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest if not told")
    add_submission(parser)
    options = parser.parse_args(words)
    config = configuration(parser, options)
    with Client() as client:
        labels: dict[str, Any] = {"name": options.name, "tags": options.tags}
        if options.project is not None:
            labels["project"] = options.project
        queued = client.fork(options.run, config, step=options.step, **labels)
        tell_queued(client, queued, options)


def go_on(words: list[str]) -> None:
    """Continue a cancelled or failed run from its last checkpoint, as a new run."""
    act("run go-on", go_on, Client.go_on, words)


def edit(words: list[str]) -> None:
    """Change a run's name, tags or note: `edit 1 --name baseline --tag lr --note 'too slow'`."""
    parser = parser_of("run edit", edit)
    parser.add_argument("run", type=int)
    parser.add_argument("--name")
    parser.add_argument("--tag", action="append", dest="tags", help="these, and no others")
    parser.add_argument("--no-tags", action="store_const", const=[], dest="tags")
    parser.add_argument("--note", help="Markdown; - reads it from stdin")
    options = parser.parse_args(words)
    if options.name is options.tags is options.note is None:
        parser.error("allowed is at least one of --name, --tag, --no-tags and --note")
    note = heard(parser, sys.stdin.read) if options.note == "-" else options.note
    with Client() as client:
        tell(client.edit(options.run, name=options.name, tags=options.tags, note=note), options)


def delete(words: list[str]) -> None:
    """Put runs that have ended into the trash, from where `restore` takes them for some days."""
    _bulk("delete", _bulk_parser("delete", delete).parse_args(words), "is in the trash")


def restore(words: list[str]) -> None:
    """Take runs out of the trash."""
    _bulk("restore", _bulk_parser("restore", restore).parse_args(words), "is restored")


def move(words: list[str]) -> None:
    """Let runs go from one project to another, if you maintain both: `move 3 --project vision`."""
    parser = _bulk_parser("move", move)
    parser.add_argument("--project", required=True, help="'' is the one that there always is")
    _bulk("move", parser.parse_args(words), "is moved")


def _bulk_parser(action: str, command: Any) -> ArgumentParser:
    parser = parser_of(f"run {action}", command, "the exit code is 1 if one was refused")
    parser.add_argument("runs", type=int, nargs="+")
    return parser


def _bulk(action: str, options: Namespace, outcome: str) -> None:
    with Client() as client:
        answer = client.bulk(action, options.runs, project=getattr(options, "project", None))
    if options.json:
        print(json.dumps(answer))
    else:
        for run_id in answer["done"]:
            print(f"run {run_id} {outcome}")
        for each in answer["refused"]:
            warn(each["detail"])
    sys.exit(bool(answer["refused"]))


def _event_line(event: dict[str, Any]) -> str:
    change = f"{event['scale_before']} → {event['scale_after']}"
    culprits = ", ".join(each["name"] for each in event["culprits"])
    return f"{event['step']:>8}  {event['kind']:<8} {change}  {culprits}".rstrip()
