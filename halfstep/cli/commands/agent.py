"""`halfstep agent SWEEP -- COMMAND`: runs a command for points of a sweep."""

import sys
from typing import Annotated

import typer

from halfstep.cli.application import App
from halfstep.cli.options import AsJson, SweepId
from halfstep.cli.output import print_result
from halfstep.number_formats import quantity

app = App("Run a command for each point of a sweep.")


@app.command()
def agent(
    sweep_id: SweepId,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND", help="The command, with placeholders: python train.py --lr {lr}"
        ),
    ],
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of points; default: all that are left"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a command for points of a sweep, until there is none.

    `halfstep agent 3 -- python train.py --lr {lr}`. The script calls `halfstep.watch`, whose run
    is that of the point. Several agents on any machines share the points; none is run twice.
    The exit code is 3 if a run has failed.
    """
    from halfstep.sweep_agent import run_command, with_client

    try:
        succeeded, failed = with_client(
            lambda client: run_command(client, sweep_id, words, count), None, None
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except FileNotFoundError as error:
        sys.exit(f"halfstep: {error.filename} cannot be started: {error.strerror}")
    text = f"sweep {sweep_id}: {quantity(succeeded, 'run')} succeeded, {failed} failed"
    fields = {"sweep": sweep_id, "succeeded": succeeded, "failed": failed}
    print_result(fields, text, as_json=as_json)
    if failed:
        raise typer.Exit(3)
