"""`halfstep run reproduce`: commands that repeat a run, or a run queued from its commit."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli import reproduction
from halfstep.cli.application import App
from halfstep.cli.commands.run_control import report_queued
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson, RunId
from halfstep.cli.output import print_result, warn

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunSummary
    from halfstep.client import Client


def add_to(app: App) -> None:
    """Add the command to the group `run`."""
    app.command("reproduce")(reproduce)


def reproduce(
    run_id: RunId,
    patch: Annotated[bool, typer.Option("--patch", help="Print the patch, for git apply")] = False,
    requirements: Annotated[
        bool, typer.Option("--requirements", help="Print the packages, for pip install -r")
    ] = False,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue",
            help="Queue the command in a clone at the commit, with the patch; a recipe's run with "
            "its settings",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the shell commands that bring commit, patch, packages and command of a run back.

    Of a recipe's run: the command that submits it again.
    """
    if patch + requirements + queue > 1:
        raise typer.BadParameter("use at most one of --patch, --requirements and --queue")
    with connect() as client:
        environment = client.environment(run_id)
        if queue and environment.get("submit_command"):
            queued = _submit_again(client, run_id)
            report_queued(client, queued, wait=False, as_json=as_json)
            return
        if queue:
            if obstacles := reproduction.obstacles(environment):
                raise typer.BadParameter(f"run {run_id} cannot be queued: {'; '.join(obstacles)}")
            for note in reproduction.missing(environment):
                warn(note)
            queued = client.submit_command(
                **reproduction.command_of(environment), name=f"run {run_id} again"
            )
            report_queued(client, queued, wait=False, as_json=as_json)
            return
    if patch:
        text = (environment["diff"] or "").rstrip("\n")
    elif requirements:
        text = reproduction.requirements(environment)
    else:
        text = reproduction.script(run_id, environment)
    print_result(environment, text, as_json=as_json)


def _submit_again(client: "Client", run_id: int) -> "RunSummary":
    """Queue a recipe's run with the same settings, from the same checkpoint."""
    run = client.run(run_id)
    place = ("project", "nodes", "devices_per_node", "preemptible", "parent_id", "parent_step")
    options = {name: value for name, value in run.items() if name in place and value is not None}
    return client.submit(
        run["recipe"], run["config"], name=f"run {run_id} again", tags=run["tags"], **options
    )
