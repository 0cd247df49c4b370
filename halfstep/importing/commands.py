"""`halfstep import`: what other loggers recorded, as runs of ours."""

import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from halfstep.api_client import credentials
from halfstep.api_client.progress import Progress
from halfstep.api_client.responses import ApiError
from halfstep.cli.typed import parser_of
from halfstep.importing.folder import write_run
from halfstep.importing.source import Damaged, Found
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.run_folder import runs_folder
from halfstep.telemetry.upload import upload

#: What can be read, and the extra whose packages that takes.
SOURCES = {"tensorboard": "tensorboard", "wandb": "", "mlflow": "mlflow", "neptune": "neptune"}


def import_(words: list[str]) -> None:
    """Import runs: `import tensorboard|wandb|mlflow|neptune PATH`; twice does no harm."""
    exits = "The exit code is 1 if a run could not be read to its end, or not be sent"
    parser = parser_of("import", import_, exits)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("path", type=Path, help="of a folder, file or database")
    parser.add_argument("--project", help="of all runs; as the source has it if not told")
    parser.add_argument("--folder", type=Path, default=runs_folder(), help="where runs lie")
    parser.add_argument("--offline", action="store_true", help="send nothing")
    options = parser.parse_args(words)
    if not options.path.exists():
        parser.error(f"path is {str(options.path)!r}; allowed: what is there")
    server = None if options.offline else credentials.known()
    failures: list[str] = []
    told = Progress("runs")

    def complain(text: str) -> None:
        failures.append(text)
        told.wipe()
        print(f"halfstep: {text}", file=sys.stderr)

    found = 0
    with told:
        for each in _runs(options.source)(options.path):
            found += 1
            told(found)
            if isinstance(each, Damaged):
                complain(str(each))
                continue
            try:
                written = write_run(each, options.folder, complain, project=options.project)
            except (ValueError, ArithmeticError, OSError) as error:
                complain(f"{each.name} cannot be imported: {error}")
                continue
            page = None
            if server is not None:
                try:
                    with Ingest(server) as ingest:
                        page = upload(written.folder, ingest, complain, time.sleep).page
                except ApiError as error:
                    complain(f"{written.folder} is not sent: {error}")
            told.wipe()
            if options.json:
                line: dict[str, object] = {
                    "folder": str(written.folder),
                    "page": page,
                    "new": written.is_new,
                }
                line |= {"steps": written.steps, "numbers": written.numbers}
                line["media"] = written.media
                print(json.dumps(line | {"left_out": dict(each.left_out)}), flush=True)
            else:
                was = "" if written.is_new else ", there already"
                counted = f"{written.steps:,} steps, {written.numbers:,} numbers"
                counted += f", {written.media:,} media" if written.media else ""
                print(f"{page or written.folder}: {counted}{was}{_left_out(each)}", flush=True)
    if not found:
        complain(f"there is nothing of {options.source}'s in {options.path}")
    sys.exit(1 if failures else 0)


def _runs(source: str) -> Callable[[Path], Iterator[Found | Damaged]]:
    try:
        module = importlib.import_module(f"halfstep.importing.{source}")
    except ModuleNotFoundError as error:
        sys.exit(f"halfstep: it takes {error.name}: pip install 'halfstep[{SOURCES[source]}]'")
    read: Callable[[Path], Iterator[Found | Damaged]] = module.runs
    return read


def _left_out(found: Found) -> str:
    counted: Counter[str] = found.left_out
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counted.items()))
    return f"; left out: {kinds}" if kinds else ""
