"""`halfstep retention COMMAND`: rules that delete old files of ended runs."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep import number_formats
from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_json, print_list, print_result

if TYPE_CHECKING:
    from halfstep.api_client.response_types import Rule
    from halfstep.client import Client

RuleProject = Annotated[
    str | None, typer.Option("--project", help="Runs of this project; '' is the default project")
]
AllProjects = Annotated[
    bool, typer.Option("--all", help="Runs of all projects that have no own rule")
]
CheckpointDays = Annotated[
    float | None,
    typer.Option(
        "--checkpoints", metavar="DAYS", help="Delete checkpoints older than this; default: keep"
    ),
]
LogDays = Annotated[
    float | None,
    typer.Option(
        "--logs",
        metavar="DAYS",
        help="Delete logs and machine samples older than this; default: keep",
    ),
]

app = App("List, preview, add or remove retention rules for ended runs.")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the retention rules."""
    with connect() as client:
        rules = client.retention()
    print_list(rules, ("Project", "Checkpoints", "Logs"), _row, as_json=as_json)


def _row(rule: "Rule") -> tuple[str, ...]:
    return _scope(rule), _days(rule["checkpoint_days"]), _days(rule["log_days"])


@app.command()
def preview(
    project: RuleProject = None,
    everything: AllProjects = False,
    checkpoints: CheckpointDays = None,
    logs: LogDays = None,
    as_json: AsJson = False,
) -> None:
    """Preview a rule's deletions: `retention preview --project vision --checkpoints 30`."""
    _check_scope(project, everything=everything)
    with connect() as client:
        _print_preview(client, project, checkpoints, logs, as_json=as_json)


@app.command()
def add(
    project: RuleProject = None,
    everything: AllProjects = False,
    checkpoints: CheckpointDays = None,
    logs: LogDays = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    as_json: AsJson = False,
) -> None:
    """Set a rule, after a preview; replaces the previous one."""
    _check_scope(project, everything=everything)
    if not yes and (as_json or not sys.stdin.isatty()):
        raise typer.BadParameter("cannot ask for confirmation without a terminal; add --yes")
    with connect() as client:
        if not yes:
            _print_preview(client, project, checkpoints, logs, as_json=False)
            if not typer.confirm("Set this rule? It deletes files permanently."):
                raise typer.Exit(1)
        rule = client.set_retention(project=project, checkpoint_days=checkpoints, log_days=logs)
    kinds = {"checkpoints": rule["checkpoint_days"], "logs and samples": rule["log_days"]}
    parts = [f"{kind} after {_days(days)}" for kind, days in kinds.items() if days is not None]
    print_result(rule, f"{_scope(rule)}: {', '.join(parts)}", as_json=as_json)


@app.command()
def remove(
    project: RuleProject = None, everything: AllProjects = False, as_json: AsJson = False
) -> None:
    """Remove a rule: it deletes nothing more."""
    _check_scope(project, everything=everything)
    with connect() as client:
        client.end_retention(project=project)
    print_result({"removed": True}, "removed the rule", as_json=as_json)


def _check_scope(project: str | None, *, everything: bool) -> None:
    if (project is None) != everything:
        raise typer.BadParameter("use only one of --project and --all")


def _print_preview(
    client: "Client",
    project: str | None,
    checkpoints: float | None,
    logs: float | None,
    *,
    as_json: bool,
) -> None:
    preview = client.preview_retention(project=project, checkpoint_days=checkpoints, log_days=logs)
    if as_json:
        print_json([preview])
        return
    from halfstep.cli.tables import print_table

    if preview["largest"]:
        rows = [
            (number_formats.size(run["stored_bytes"]), str(run["run_id"]), run["name"])
            for run in preview["largest"]
        ]
        print_table(("Size", "Run", "Name"), rows)
    if preview["not_looked_at"]:
        print(f"{preview['not_looked_at']:,} more runs have old files, and were not examined")
    print(
        f"{preview['runs']:,} runs, {number_formats.size(preview['stored_bytes'])} of files",
        flush=True,
    )


def _scope(rule: "Rule") -> str:
    if rule["scope"] == "all":
        return "all other projects"
    return rule["scope"].removeprefix("in:") or "Default project"


def _days(days: float | None) -> str:
    return number_formats.UNKNOWN if days is None else f"{number_formats.number(days)} days"
