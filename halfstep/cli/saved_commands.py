"""Commands about presets, notes and retention rules."""

import argparse
import json
import sys
from typing import Any

from halfstep.cli.typed import add_configuration, carry_out, configuration, heard, parser_of
from halfstep.client import Client


def presets(words: list[str]) -> None:
    """List presets of projects that you may submit to: `run submit --preset NAME` queues one."""
    parser = parser_of("preset list", presets)
    parser.add_argument("--project", help="of this one alone")
    options = parser.parse_args(words)
    with Client() as client:
        for each in client.presets(project=options.project):
            _tell(each, _preset_line(each), options)


def save_preset(words: list[str]) -> None:
    """Save a preset: `preset save quick digits --set training.steps=9`.

    One of the project's that is called so already makes way.
    """
    parser = parser_of("preset save", save_preset)
    parser.add_argument("name")
    parser.add_argument("recipe")
    add_configuration(parser)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="of each node")
    options = parser.parse_args(words)
    further = {} if options.project is None else {"project": options.project}
    with Client() as client:
        saved = client.save_preset(
            options.name,
            options.recipe,
            configuration(parser, options),
            tags=options.tags,
            nodes=options.nodes,
            devices_per_node=options.devices,
            **further,
        )
    _tell(saved, _preset_line(saved), options)


def remove_preset(words: list[str]) -> None:
    """Delete a preset."""
    parser = parser_of("preset remove", remove_preset)
    parser.add_argument("preset", type=int, help="its number, as `preset list` has it")
    options = parser.parse_args(words)
    with Client() as client:
        client.delete_preset(options.preset)
    removed = {"id": options.preset, "removed": True}
    _tell(removed, f"preset {options.preset} is removed", options)


PRESET = {"list": presets, "save": save_preset, "remove": remove_preset}


def preset(words: list[str]) -> None:
    """List, save or remove presets of runs."""
    carry_out("preset", preset, PRESET, words)


def show_note(words: list[str]) -> None:
    """Print the note on a project, or on runs side by side: `note show 1 3`."""
    parser = _note_parser("show", show_note)
    options = _of_runs_or_project(parser, words)
    with Client() as client:
        text = client.note(*options.runs, project=options.project)
    _tell({"note": text}, text, options)


def write_note(words: list[str]) -> None:
    """Write the note on a project, or on runs side by side: `note write 1 3 --note 'too slow'`."""
    parser = _note_parser("write", write_note)
    parser.add_argument(
        "--note", required=True, help="Markdown; - reads it from stdin; an empty one takes it away"
    )
    options = _of_runs_or_project(parser, words)
    note = heard(parser, sys.stdin.read) if options.note == "-" else options.note
    with Client() as client:
        text = client.write_note(note, *options.runs, project=options.project)
    _tell({"note": text}, "the note is saved" if text else "there is no note any more", options)


NOTE = {"show": show_note, "write": write_note}


def note(words: list[str]) -> None:
    """Show or write the note on a project or a comparison."""
    carry_out("note", note, NOTE, words)


def rules(words: list[str]) -> None:
    """List the rules by which what of ended runs is deleted."""
    parser = parser_of("retention list", rules)
    options = parser.parse_args(words)
    with Client() as client:
        for each in client.retention():
            _tell(each, _rule_line(each), options)


def preview(words: list[str]) -> None:
    """Preview what a rule deletes: `retention preview --project vision --checkpoints 30`."""
    options = _rule_parser("preview", preview).parse_args(words)
    with Client() as client:
        _tell_preview(client, options)


def add(words: list[str]) -> None:
    """Set a rule, after a preview; replaces the previous one."""
    parser = _rule_parser("add", add)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(words)
    if not options.yes and (options.json or not sys.stdin.isatty()):
        parser.error("nobody can be asked; allowed: with --yes")
    with Client() as client:
        if not options.yes:
            _tell_preview(client, options)
            if input("Set this rule, which deletes for good? [y/N]: ").lower() not in ("y", "yes"):
                sys.exit(1)
        made = client.set_retention(**_days(options))
    _tell(made, _rule_line(made), options)


def remove(words: list[str]) -> None:
    """Let nothing more be deleted by a rule."""
    parser = parser_of("retention remove", remove)
    _add_scope(parser)
    options = parser.parse_args(words)
    with Client() as client:
        client.end_retention(project=options.project)
    _tell({"removed": True}, "the rule is removed", options)


RETENTION = {"list": rules, "add": add, "preview": preview, "remove": remove}


def retention(words: list[str]) -> None:
    """List, preview, add or remove retention rules for ended runs."""
    carry_out("retention", retention, RETENTION, words)


def _note_parser(name: str, command: Any) -> argparse.ArgumentParser:
    parser = parser_of(f"note {name}", command)
    parser.add_argument("runs", type=int, nargs="*", metavar="RUN", help="in whatever order")
    parser.add_argument("--project", help="'' is the one that there always is")
    return parser


def _of_runs_or_project(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    options = parser.parse_args(words)
    if bool(options.runs) == (options.project is not None):
        parser.error("allowed are runs or --project, one of the two")
    return options


def _rule_parser(name: str, command: Any) -> argparse.ArgumentParser:
    more = "what is not told is kept"
    parser = parser_of(f"retention {name}", command, more)
    _add_scope(parser)
    parser.add_argument("--checkpoints", type=float, metavar="DAYS", help="older than so many")
    parser.add_argument("--logs", type=float, metavar="DAYS", help="and samples of the machine")
    return parser


def _add_scope(parser: argparse.ArgumentParser) -> None:
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--project", help="whose runs; '' is the one that there always is")
    text = "of all projects without a rule of their own"
    of.add_argument("--all", action="store_const", const=None, dest="project", help=text)


def _days(options: argparse.Namespace) -> dict[str, Any]:
    of = {"project": options.project}
    return of | {"checkpoint_days": options.checkpoints, "log_days": options.logs}


def _tell_preview(client: Client, options: argparse.Namespace) -> None:
    found = client.preview_retention(**_days(options))
    if options.json:
        print(json.dumps(found), flush=True)
        return
    for each in found["largest"]:
        print(f"{each['stored_bytes']:>16,} B  {each['run_id']:>6}  {each['name']}")
    if found["not_looked_at"]:
        print(f"{found['not_looked_at']:,} more have something old, and were not looked at")
    print(f"{found['runs']:,} runs, {found['stored_bytes']:,} B of files", flush=True)


def _tell(found: dict[str, Any], line: str, options: argparse.Namespace) -> None:
    print(json.dumps(found) if options.json else line, flush=True)


def _preset_line(preset: dict[str, Any]) -> str:
    of = f"  in {preset['project']}" if preset["project"] else ""
    return f"{preset['id']:>6}  {preset['name']}: {preset['recipe']}{of}"


def _rule_line(rule: dict[str, Any]) -> str:
    whose = rule["scope"].removeprefix("in:") or "Default project"
    kinds = {"checkpoints": rule["checkpoint_days"], "logs and samples": rule["log_days"]}
    told = (f"{kind} after {days:g} days" for kind, days in kinds.items() if days is not None)
    return f"{'all other projects' if rule['scope'] == 'all' else whose}: {', '.join(told)}"
