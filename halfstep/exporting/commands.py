"""`halfstep export`: runs of a server, for what other loggers read."""

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfstep.cli.application import single
from halfstep.cli.options import AsJson, RunId, check_folder
from halfstep.cli.output import print_result
from halfstep.telemetry.plain_json import is_unicode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from halfstep.api_client.progress import Progress
    from halfstep.exporting.points import Point

#: What can be written, and the extra whose packages that takes.
TARGETS = {"tensorboard": "tensorboard", "mlflow": ""}


@single()
def app(
    target: Annotated[
        Literal["tensorboard", "mlflow"],
        typer.Argument(metavar="TARGET", help="tensorboard or mlflow"),
    ],
    run_id: RunId,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="logdir of TensorBoard, or MLflow's mlruns")
    ],
    as_json: AsJson = False,
) -> None:
    """Export a run: `export tensorboard|mlflow RUN FOLDER`, every step and every logged number."""
    check_folder(folder)
    if not is_unicode(str(folder)):  # TensorBoard and MLflow write paths as UTF-8
        shown = f"{os.fsencode(folder)!r} is not valid; allowed: UTF-8"
        raise typer.BadParameter(shown, param_hint="FOLDER")
    from halfstep.api_client.progress import Progress
    from halfstep.client import Client
    from halfstep.exporting.points import points_of

    try:
        writer = importlib.import_module(f"halfstep.exporting.{target}")
    except ModuleNotFoundError as error:
        extra = TARGETS[target]
        sys.exit(f"halfstep: {error.name} is required: pip install 'halfstep[{extra}]'")
    with Client() as client, Progress(f"run {run_id}") as progress:
        run = client.run(run_id)
        try:
            path = writer.write(run, _count(points_of(client, run), progress), folder)
        except FileExistsError as error:
            sys.exit(f"halfstep: run {run_id} already exists: {error.filename or error}")
    print_result({"folder": str(path)}, str(path), as_json=as_json)


def _count(points: "Iterable[Point]", progress: "Progress") -> "Iterator[Point]":
    for number, point in enumerate(points, start=1):
        if number % 1000 == 0:
            progress(number)
        yield point
