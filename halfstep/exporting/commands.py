"""`halfstep export`: runs of a server, for what other loggers read."""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator

from halfstep.api_client.progress import Progress
from halfstep.cli.typed import folder_of, parser_of
from halfstep.client import Client
from halfstep.exporting.points import Point, points_of

#: What can be written, and the extra whose packages that takes.
TARGETS = {"tensorboard": "tensorboard", "mlflow": ""}


def export(words: list[str]) -> None:
    """Export a run: `export tensorboard|mlflow RUN FOLDER`, every step and every logged number."""
    parser = parser_of("export", export)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("run", type=int)
    logdir = "a logdir of TensorBoard's, or MLflow's mlruns"
    parser.add_argument("folder", type=folder_of, help=logdir)
    options = parser.parse_args(words)
    try:
        target = importlib.import_module(f"halfstep.exporting.{options.target}")
    except ModuleNotFoundError as error:
        extra = TARGETS[options.target]
        sys.exit(f"halfstep: it takes {error.name}: pip install 'halfstep[{extra}]'")
    with Client() as client, Progress(f"run {options.run}") as told:
        run = client.run(options.run)
        try:
            place = target.write(run, _counted(points_of(client, run), told), options.folder)
        except FileExistsError as error:
            sys.exit(f"halfstep: run {options.run} is there already: {error.filename or error}")
    print(json.dumps({"folder": str(place)}) if options.json else place)


def _counted(points: Iterable[Point], told: Progress) -> Iterator[Point]:
    for number, point in enumerate(points, start=1):
        if number % 1000 == 0:
            told(number)
        yield point
