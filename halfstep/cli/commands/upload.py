"""`halfstep upload`: upload watched runs from their folders."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.api_client import credentials
from halfstep.api_client.errors import ApiError
from halfstep.cli.application import single
from halfstep.cli.options import AsJson

if TYPE_CHECKING:
    from halfstep.telemetry.upload import Sent


@single()
def app(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Folders of runs, or their parent folders"),
    ],
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also send checkpoints that were only registered"),
    ] = False,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Delete spools of attempts that have ended and were sent"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload watched runs from their folders; complete, partial or repeated.

    The exit code is 1 if something could not be sent.
    """
    from halfstep.api_client.progress import Progress
    from halfstep.telemetry.ingest import Ingest
    from halfstep.telemetry.upload import Sent, run_folders
    from halfstep.telemetry.upload import upload as send_run

    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise typer.BadParameter(f"{missing[0]} is no folder")
    runs = [run for folder in folders for run in run_folders(folder.absolute())]
    if not runs:
        raise typer.BadParameter(f"there is no run in {', '.join(map(str, folders))}")
    server = credentials.find()
    if server is None:
        raise typer.BadParameter(
            "no server is configured: run `halfstep login`, or set HALFSTEP_URL and HALFSTEP_TOKEN"
        )
    progress = Progress("runs")

    def warn(text: str) -> None:
        progress.wipe()
        print(f"halfstep: {text}", file=sys.stderr)

    is_complete = True
    with Ingest(server) as ingest, progress:
        for number, folder in enumerate(runs):
            progress(number, len(runs))
            try:
                sent = send_run(
                    folder,
                    ingest,
                    warn,
                    time.sleep,
                    with_checkpoints=checkpoints,
                    delete=delete,
                )
            except (ApiError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                if isinstance(error, ApiError) and error.status in (0, 401):  # of every folder
                    raise
                sent = Sent(None, is_over=False, problems=(_problem(error),))
            progress.wipe()
            is_complete = is_complete and not sent.problems
            if as_json:
                print(json.dumps({"folder": str(folder), **sent._asdict()}), flush=True)
            else:
                print(f"{folder}: {_sent_line(sent)}", flush=True)
    raise typer.Exit(0 if is_complete else 1)


def _problem(error: Exception) -> str:
    """Return on one line why a folder was not sent."""
    is_sentence = isinstance(error, ApiError | OSError) or type(error) is ValueError
    return " ".join((str(error) if is_sentence else f"{type(error).__name__}: {error}").split())


def _sent_line(sent: "Sent") -> str:
    is_running = not sent.is_over and (sent.page or not sent.problems)
    more = ["it has not ended yet"] if is_running else []
    return "; ".join([sent.page or "not sent", *more, *sent.problems])
