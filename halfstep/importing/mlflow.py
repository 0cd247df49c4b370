"""Import from MLflow: its SQLite database, or its older folder `mlruns`, without MLflow.

The folder's meta.yaml is read with `pyyaml` (the extra `mlflow`).
"""

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from halfstep.importing.media import read
from halfstep.importing.source import Damaged, Media, Point, SourceRun, literal, nest
from halfstep.telemetry.attempt_messages import WatchedStatus
from halfstep.telemetry.plain_json import JsonObject

STATUSES: dict[str, WatchedStatus] = {"FAILED": "failed", "KILLED": "terminated"}
NUMBERED = {4: "FAILED", 5: "KILLED"}  # numbers in meta.yaml
INFINITE = 1.7976931348623157e308  # stands for infinity in the database
OWN = "mlflow."  # prefix of tags that MLflow sets itself
#: Artifacts to import, and the file names of `mlflow.log_image` with a step.
SUFFIXES = (".png", ".jpg", ".jpeg", ".wav")
LOGGED = re.compile(
    r"(?P<key>.+)[%+]step[%+](?P<step>\d{1,15})[%+]timestamp[%+](?P<time>\d{1,15})[%+].*"
)
THUMBNAIL = "compressed.webp"


def runs(path: Path) -> Iterator[SourceRun | Damaged]:
    """Yield the runs of a database, or of a folder with one, or of `mlruns` or its parent."""
    if path.is_file():
        yield from _of_database(path)
    elif (path / "mlflow.db").is_file():
        yield from _of_database(path / "mlflow.db")
    else:
        yield from _of_folder(path / "mlruns" if (path / "mlruns").is_dir() else path)


# ---- The database ------------------------------------------------------------------------------


def _of_database(path: Path) -> Iterator[SourceRun | Damaged]:
    query = (
        "SELECT run_uuid, r.name, e.name, status, start_time, end_time, r.artifact_uri FROM runs r"
        " JOIN experiments e ON e.experiment_id = r.experiment_id"
        " WHERE r.lifecycle_stage = 'active' ORDER BY start_time, run_uuid"
    )
    try:
        with closing(_open(path)) as database:
            rows = database.execute(query).fetchall()
            described = [(row, _describe(database, row[0])) for row in rows]
    except sqlite3.Error as error:
        yield Damaged(f"{path} is not an MLflow database: {error}")
        return
    for (run_id, name, experiment, status, start, end, uri), described_as in described:
        params, tags, counted = described_as
        files = _artifacts(path.parent, uri, run_id)
        left_out: Counter[str] = Counter()
        yield SourceRun(
            identity=f"mlflow:{run_id}",
            fingerprint=f"{status} {end} {counted} {len(files)}",
            name=name or run_id,
            project=experiment,
            config=_config(params),
            tags=_tags(tags),
            started=start / 1000 if start else None,
            status=STATUSES.get(status, "finished"),
            points=partial(_points_of_database, path, run_id, files, left_out),
            left_out=left_out,
        )


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def _describe(database: sqlite3.Connection, run_id: str) -> tuple[dict[str, str], Any, int]:
    params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,))
    tags = database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,))
    counting = "SELECT count(*) FROM metrics WHERE run_uuid = ?"
    [counted] = database.execute(counting, (run_id,)).fetchone()
    return dict(params), dict(tags), counted


def _points_of_database(
    path: Path, run_id: str, files: list[Path], left_out: "Counter[str]"
) -> Iterator[Point | Media]:
    query = (
        "SELECT key, step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ?"
        " ORDER BY step, timestamp"
    )
    try:
        with closing(_open(path)) as database:
            for key, step, timestamp, value, is_nan in database.execute(query, (run_id,)):
                yield Point(
                    key, step, timestamp / 1000, math.nan if is_nan else _restore_infinity(value)
                )
    except sqlite3.Error as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    yield from _media(files, left_out)


def _artifacts(folder: Path, uri: str | None, run_id: str) -> list[Path]:
    """List a run's artifacts, if they are in a local folder of that run."""
    parts = urlsplit(uri or "")
    place = folder / unquote(parts.path)
    if parts.scheme not in ("", "file") or place.parts[-2:] != (run_id, "artifacts"):
        return []
    return [*_files(place).values()]


def _restore_infinity(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= INFINITE else value


# ---- The folder --------------------------------------------------------------------------------


class _Meta(NamedTuple):
    """Content of a run's meta.yaml."""

    run_id: str
    name: str
    status: str  # as MLflow names it
    start: float | None
    is_active: bool


def _of_folder(path: Path) -> Iterator[SourceRun | Damaged]:
    for meta in sorted(path.glob("*/*/meta.yaml")):
        folder = meta.parent
        if folder.parent.name == ".trash":
            continue
        try:
            run_meta = _meta(meta)
            experiment = _yaml(folder.parent / "meta.yaml").get("name")
        except (OSError, ValueError) as error:
            yield Damaged(f"{meta} is damaged: {error}")
            continue
        if run_meta.is_active:
            yield _of_run(folder, run_meta, experiment)


def _of_run(folder: Path, run_meta: _Meta, experiment: str | None) -> SourceRun:
    files, artifacts = _files(folder / "metrics"), [*_files(folder / "artifacts").values()]
    left_out: Counter[str] = Counter()
    tags = {name: path.read_text() for name, path in _files(folder / "tags").items()}
    params = {name: path.read_text() for name, path in _files(folder / "params").items()}
    sizes = " ".join(f"{name}:{path.stat().st_size}" for name, path in files.items())
    return SourceRun(
        identity=f"mlflow:{run_meta.run_id}",
        fingerprint=f"{run_meta.status} {sizes} {len(artifacts)}",
        name=run_meta.name or tags.get("mlflow.runName") or run_meta.run_id,
        project=experiment,
        config=_config(params),
        tags=_tags(tags),
        started=run_meta.start,
        status=STATUSES.get(run_meta.status, "finished"),
        points=lambda: chain(_points_of_files(files), _media(artifacts, left_out)),
        left_out=left_out,
    )


def _meta(path: Path) -> _Meta:
    meta = _yaml(path)
    status = meta.get("status")
    start = meta.get("start_time")
    return _Meta(
        run_id=str(meta.get("run_id") or meta.get("run_uuid") or path.parent.name),
        name=str(meta.get("run_name") or ""),
        status=status if isinstance(status, str) else NUMBERED.get(status or 0, ""),
        start=start / 1000 if isinstance(start, int) else None,
        is_active=meta.get("lifecycle_stage", "active") == "active",
    )


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def _files(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by name; that of "train/loss" is in a subfolder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _points_of_files(files: dict[str, Path]) -> Iterator[Point]:
    for name, path in files.items():
        with path.open() as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    timestamp, value, *step = line.split()[:3]
                    at = int(step[0]) if step else number - 1
                    point = Point(name, at, int(timestamp) / 1000, float(value))
                except ValueError as error:
                    raise Damaged(f"{path} is damaged in line {number:,}") from error
                yield point


# ---- Artifacts ---------------------------------------------------------------------------------


def _media(files: list[Path], left_out: "Counter[str]") -> Iterator[Media]:
    """Yield images and audio; those logged without a step get step 0."""
    left_out.clear()
    for path in files:
        content = read(path.parent, path.name) if path.suffix.lower() in SUFFIXES else None
        if content is None:
            left_out["artifact"] += not path.name.endswith(THUMBNAIL)
        elif logged := LOGGED.fullmatch(path.stem):
            key = logged["key"].replace("#", "/")
            yield Media(key, int(logged["step"]), int(logged["time"]) / 1000, content)
        else:
            yield Media(path.stem, 0, None, content)


def _config(params: dict[str, str]) -> JsonObject:
    return nest({name: literal(value) for name, value in params.items()})


def _tags(tags: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={tags[name]}" for name in sorted(tags) if not name.startswith(OWN))
