"""The worker's command. It starts the warm process first, which loads torch in parallel.

python -m worker.worker          (or: halfstep worker; `--check` reports whether it is healthy)
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import setproctitle
import typer

from db.errors import HalfstepError
from db.settings import Settings
from halfstep.cli.application import ServingCommand, single
from halfstep.process import close_to_others, loading_modules
from worker.names import is_healthy
from worker.warm_start import WarmProcess


@single(ServingCommand)
def main(
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 0 if the worker started here is healthy, else 1"),
    ] = False,
    only: Annotated[
        int | None,
        typer.Option(metavar="RUN", help="Train only this run, then exit (for clusters)"),
    ] = None,
    wait_for_start: Annotated[
        bool,
        typer.Option(
            "--wait-for-start", hidden=True, help="Start when a byte arrives on standard input"
        ),
    ] = False,
) -> None:
    """Start a worker: it offers this machine's devices, and trains queued runs.

    The server is the one whose database HALFSTEP_DATABASE_URL names. SIGTERM or Ctrl-C ends it.
    """
    close_to_others()
    if wait_for_start:
        setproctitle.setproctitle("halfstep: worker")
    try:
        settings = Settings.read()
        if check:
            sys.exit(not is_healthy(settings))
        warm = WarmProcess(settings) if settings.warm_start and only is None else None
        with loading_modules():
            from worker import daemon  # takes more than a second

        if wait_for_start and not _has_started():
            return
        daemon.run(settings, only, warm)
    except HalfstepError as error:
        sys.exit(f"worker: {error}")


def _has_started() -> bool:
    """Wait for `halfstep up`; return False if it has failed."""
    is_told = bool(os.read(0, 1))
    with Path(os.devnull).open() as null:
        os.dup2(null.fileno(), 0)
    return is_told


if __name__ == "__main__":
    main()
