"""The worker's command. It starts the warm process first, which loads torch in parallel.

python -m worker.worker          (or: halfstep worker; `--check` reports whether it is healthy)
"""

import sys
from typing import Annotated

import typer

from db.errors import HalfstepError
from db.settings import Settings
from halfstep.cli.application import ServingCommand, single
from halfstep.process import close_to_others
from worker.names import is_turning
from worker.warm_start import WarmProcess


@single(ServingCommand)
def main(
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 0 if the worker started here is healthy, else 1"),
    ] = False,
    only: Annotated[
        int | None,
        typer.Option(metavar="RUN", help="Train only this run, and end with it: for clusters"),
    ] = None,
) -> None:
    """Start a worker: it offers this machine's devices, and trains queued runs.

    The server is the one whose database HALFSTEP_DATABASE_URL names. SIGTERM or Ctrl-C ends it.
    """
    close_to_others()
    try:
        settings = Settings.read()
        if check:
            sys.exit(not is_turning(settings))
        warm = WarmProcess(settings) if settings.warm_start and only is None else None
        from worker import daemon  # takes more than a second

        daemon.run(settings, only, warm)
    except HalfstepError as error:
        sys.exit(f"worker: {error}")


if __name__ == "__main__":
    main()
