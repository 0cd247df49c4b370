"""Export to MLflow's file store `mlruns`, written without MLflow.

    <folder>/<experiment>/meta.yaml
    <folder>/<experiment>/<run>/meta.yaml, metrics/<name>, params/<name>, tags/<name>

MLflow reads it if MLFLOW_ALLOW_FILE_STORE is true, and `mlflow migrate-filestore` imports it into a
database. A line of a metric is: milliseconds since 1970, value, step.
"""

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from halfstep.exporting.points import Point

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunDetail

FROM = uuid.UUID("b2a4a0c5-6a5d-4a41-8e1e-4d1f6f1f8f57")  # namespace of ids derived from ours
STATUSES = {"finished": 3, "failed": 4, "cancelled": 5}
RUNNING = 1
OPEN_FILES = 100  # limit of open files; the least recently used is closed, and reopened on demand
TEXT_CHARACTERS = 6000  # per parameter


def write(run: "RunDetail", points: Iterable[Point], folder: Path) -> Path:
    """Write the run, and its experiment if it is new; return the run's folder.

    Raises FileExistsError. The experiment is named after the run's project, else its recipe.
    """
    name = run["project"] or run["recipe"] or "halfstep"
    number = str(uuid.uuid5(FROM, name).int % 10**18)
    run_id = uuid.uuid5(FROM, f"{run['created_at']} {run['id']} {run['name']}").hex
    place = folder / number / run_id
    if place.exists():
        raise FileExistsError(place)
    unfinished = place.with_name(f".{run_id}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("metrics", "params", "tags", "artifacts"):
        (unfinished / part).mkdir(parents=True)
    experiment = folder / number / "meta.yaml"
    if not experiment.exists():
        _write_yaml(experiment, _experiment(name, number, experiment.parent))
    for key, value in _flat(run["config"]):
        _file(unfinished / "params", key).write_text(value[:TEXT_CHARACTERS])
    for key, value in _tags(run).items():
        _file(unfinished / "tags", key).write_text(value)
    with _Files(unfinished / "metrics") as files:
        for point in points:
            line = f"{round(point.time * 1000)} {point.value!r} {point.step}\n"
            files.of(point.name).write(line)
    _write_yaml(unfinished / "meta.yaml", _meta(run, run_id, number, place))
    return unfinished.rename(place)


class _Files:
    """Metric files, at most OPEN_FILES of them open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TextIO] = {}  # least recently used first

    def of(self, name: str) -> TextIO:
        file = self._open.pop(name, None) or _file(self._folder, name).open("a")
        self._open[name] = file
        if len(self._open) > OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        return file

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()


def _file(folder: Path, name: str) -> Path:
    """Return the path of a metric, parameter or tag; a slash in its name becomes a folder."""
    allowed = re.sub(r"[^\w. /:-]", "_", name)
    parts = [part for part in allowed.split("/") if part.strip(". ")]
    path = folder.joinpath(*(parts or ["_"]))
    # "loss" next to "loss/train": if a file and a folder collide, the later one is renamed.
    if path.is_dir() or any(above.is_file() for above in path.parents):
        path = folder / f"{'_'.join(parts)}_"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _tags(run: "RunDetail") -> dict[str, str]:
    tags = {"mlflow.runName": run["name"], "mlflow.user": run["owner"]}
    tags |= {f"tag.{tag}": "true" for tag in run["tags"]}
    return tags | {"halfstep.run": str(run["id"]), "halfstep.skipped": str(run["skipped"])}


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, dict) and config:
        for name, value in config.items():
            yield from _flat(value, f"{path}/{name}" if path else name)
    elif path:
        yield path, config if isinstance(config, str) else json.dumps(config)


def _experiment(name: str, number: str, place: Path) -> dict[str, object]:
    return {
        "artifact_location": place.resolve().as_uri(),
        "experiment_id": number,
        "lifecycle_stage": "active",
        "name": name,
    }


def _meta(run: "RunDetail", run_id: str, experiment: str, place: Path) -> dict[str, Any]:
    return {
        "artifact_uri": (place / "artifacts").resolve().as_uri(),
        "end_time": _milliseconds(run["ended_at"]),
        "entry_point_name": "",
        "experiment_id": experiment,
        "lifecycle_stage": "active",
        "run_id": run_id,
        "run_uuid": run_id,
        "run_name": run["name"],
        "source_name": "halfstep",
        "source_type": 4,  # local
        "source_version": "",
        "start_time": _milliseconds(run["started_at"] or run["created_at"]),
        "status": STATUSES.get(run["status"], RUNNING),
        "tags": [],
        "user_id": run["owner"],
    }


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _write_yaml(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2))  # JSON is valid YAML
