"""`halfstep top`: all running runs, refreshed."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.api_client.errors import ApiError
from halfstep.cli.application import single
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_json, warn

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ListedRun
    from halfstep.client import Client

MOST_RUNS = 200
NOTHING = "no run is running; `halfstep run list` lists all"


@single()
def app(
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, help="Time between refreshes")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show all running runs in a table that refreshes, until Ctrl-C.

    Where stdout is no terminal, or with --json, it prints the runs once.
    """
    with connect() as client:
        if as_json:
            print_json(_running(client))
            return
        from halfstep.cli.live import show_refreshed
        from halfstep.cli.tables import print_tables, run_table

        runs = _running(client)
        if not sys.stdout.isatty():
            if runs:
                print_tables(run_table(runs, "Steps/s", "Owner"))
            else:
                warn(NOTHING)
            return

        def read() -> Any:
            nonlocal runs
            note = ""
            try:
                runs = _running(client)
                if not runs:
                    note = f"  ({NOTHING})"
            except ApiError as error:
                from halfstep.api_client.responses import is_away

                if not is_away(error):
                    raise
                note = f"  ({error}; retrying)"
            return run_table(runs, "Steps/s", "Owner", title=f"Running: {len(runs)}{note}")

        show_refreshed(read, interval)


def _running(client: "Client") -> "list[ListedRun]":
    return list(client.runs("status:active -status:queued", sort="id", limit=MOST_RUNS))
