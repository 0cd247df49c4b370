"""`halfstep import`: runs of other loggers become runs of Halfstep."""

import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfstep.api_client import credentials
from halfstep.api_client.errors import ApiError
from halfstep.cli.application import single
from halfstep.cli.options import AsJson

if TYPE_CHECKING:
    from halfstep.importing.source import Damaged, SourceRun

#: What can be read, and the extra whose packages that takes.
SOURCES = {"tensorboard": "tensorboard", "wandb": "", "mlflow": "mlflow", "neptune": "neptune"}


@single()
def app(
    source: Annotated[
        Literal["tensorboard", "wandb", "mlflow", "neptune"],
        typer.Argument(metavar="SOURCE", help="tensorboard, wandb, mlflow or neptune"),
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder, file or database to read")],
    project: Annotated[
        str | None, typer.Option(help="Project of all runs; default: the source's project")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the runs; default: halfstep-runs")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not upload to a server")] = False,
    as_json: AsJson = False,
) -> None:
    """Import runs: `import tensorboard|wandb|mlflow|neptune PATH`; repeating it does no harm.

    The exit code is 1 if a run could not be read to its end, or not be sent.
    """
    if not path.exists():
        raise typer.BadParameter(f"path is {str(path)!r}, which does not exist")
    from halfstep.api_client.progress import Progress
    from halfstep.importing.folder import write_run
    from halfstep.importing.source import Damaged
    from halfstep.telemetry.ingest import Ingest
    from halfstep.telemetry.run_folder import runs_folder
    from halfstep.telemetry.upload import upload

    folder = folder or runs_folder()
    server = None if offline else credentials.find()
    failures: list[str] = []
    progress = Progress("runs")

    def tell(text: str) -> None:
        progress.wipe()
        print(f"halfstep: {text}", file=sys.stderr)

    def complain(text: str) -> None:
        failures.append(text)
        tell(text)

    count = 0
    with progress:
        for run in _runs(source)(path):
            count += 1
            progress(count)
            if isinstance(run, Damaged):
                complain(str(run))
                continue
            try:
                written = write_run(run, folder, complain, project=project)
            except (ValueError, ArithmeticError, OSError) as error:
                complain(f"{run.name} cannot be imported: {error}")
                continue
            page = None
            if server is not None:
                try:
                    with Ingest(server) as ingest:
                        sent = upload(written.folder, ingest, complain, time.sleep, tell=tell)
                        page = sent.page
                except ApiError as error:
                    complain(f"{written.folder} is not sent: {error}")
            progress.wipe()
            if as_json:
                line: dict[str, object] = {
                    "folder": str(written.folder),
                    "page": page,
                    "new": written.is_new,
                }
                line |= {"steps": written.steps, "numbers": written.numbers}
                line["media"] = written.media
                print(json.dumps(line | {"left_out": dict(run.left_out)}), flush=True)
            else:
                was = "" if written.is_new else ", there already"
                counted = f"{written.steps:,} steps, {written.numbers:,} numbers"
                counted += f", {written.media:,} media" if written.media else ""
                print(f"{page or written.folder}: {counted}{was}{_left_out(run)}", flush=True)
    if not count:
        complain(f"there are no runs of {source} in {path}")
    raise typer.Exit(1 if failures else 0)


def _runs(source: str) -> "Callable[[Path], Iterator[SourceRun | Damaged]]":
    try:
        module = importlib.import_module(f"halfstep.importing.{source}")
    except ModuleNotFoundError as error:
        sys.exit(f"halfstep: {error.name} is required: pip install 'halfstep[{SOURCES[source]}]'")
    read: Callable[[Path], Iterator[SourceRun | Damaged]] = module.runs
    return read


def _left_out(run: "SourceRun") -> str:
    counted: Counter[str] = run.left_out
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counted.items()))
    return f"; left out: {kinds}" if kinds else ""
