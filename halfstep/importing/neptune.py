"""Import from Neptune's exporter: Parquet files `<run>_part_<n>.parquet`, one row per value.

Columns: project_id, run_id, attribute_path, attribute_type (float, int, string, bool, datetime,
string_set, float_series, file, file_series, histogram_series, and others), step, timestamp, and
one column of values per type. Files are next to the data:

    data/<project>/<run>_part_<n>.parquet
    files/<project>/<path>      path: value of the column file_value; for a file_set a folder

https://github.com/neptune-ai/neptune-exporter. Read with `pyarrow` (the extra `neptune`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from halfstep.importing.media import MOST, histogram_of, inside, named_suffix_of, read
from halfstep.importing.source import Damaged, Media, Point, SourceRun, nest
from halfstep.telemetry.plain_json import JsonObject

ROWS = 20_000
PART = re.compile(r"(?P<run>.*?)_part_(?P<number>\d+)")
#: Types with one value per run, and their columns.
VALUES = {
    "float": "float_value",
    "int": "int_value",
    "string": "string_value",
    "bool": "bool_value",
    "datetime": "datetime_value",
    "string_set": "string_set_value",
}
COLUMNS = ["attribute_path", "attribute_type", "step", "timestamp"]
PAYLOADS = ["float_value", "file_value", "histogram_value"]
#: File types: an artifact of neptune2 lists external files, a file_set is a folder.
FILE_SET = "file_set"
FILES = ("file", "file_series", "artifact", FILE_SET)


def runs(path: Path) -> Iterator[SourceRun | Damaged]:
    """Yield the runs at or below a folder, or that of one file."""
    parts: dict[tuple[Path, str], list[tuple[int, Path]]] = {}
    for file in [path] if path.is_file() else sorted(path.rglob("*.parquet")):
        matched = PART.fullmatch(file.stem)
        name, number = (matched["run"], int(matched["number"])) if matched else (file.stem, 0)
        parts.setdefault((file.parent, name), []).append((number, file))
    for own in parts.values():
        files = [file for _, file in sorted(own)]
        try:
            yield _source_run(files)
        except Damaged as error:
            yield error


def _source_run(files: list[Path]) -> SourceRun:
    values: JsonObject = {}
    named: dict[str, Any] = {}
    columns = ["project_id", "run_id", "attribute_path", "attribute_type", *VALUES.values()]
    for row in _rows(files, columns, [*VALUES]):
        named = named or row
        values[row["attribute_path"]] = _plain(row[VALUES[row["attribute_type"]]])
    if not named:  # a run without any such value
        named = next(_rows(files, columns), {})
    project, run_id = named.get("project_id"), named.get("run_id")
    if not project or not run_id:
        raise Damaged(f"{files[0]} has no run")
    name = values.get("sys/name") or run_id
    left_out: Counter[str] = Counter()
    return SourceRun(
        identity=f"neptune:{project}/{run_id}",
        fingerprint=" ".join(f"{file.name}:{file.stat().st_size}" for file in files),
        name=str(name),
        project=str(project),
        config=nest({k: v for k, v in values.items() if not k.startswith("sys/")}),
        tags=tuple(sorted(values.get("sys/tags") or ())),
        started=_seconds(values.get("sys/creation_time")),
        host=str(values.get("sys/hostname") or ""),
        status="failed" if values.get("sys/failed") is True else "finished",
        points=partial(_points, files, left_out),
        left_out=left_out,
    )


def _points(files: list[Path], left_out: "Counter[str]") -> Iterator[Point | Media]:
    left_out.clear()
    project = files[0].parent
    own = project.parent.parent / "files" / project.name
    for row in _rows(files, [*COLUMNS, *PAYLOADS]):
        kind, name, step = row["attribute_type"], row["attribute_path"], row["step"]
        time = row["timestamp"].timestamp() if row["timestamp"] is not None else None
        if kind in VALUES:
            continue
        if step is not None and step % 1:
            left_out["value between two steps"] += 1
            continue
        if kind == "float_series" and row["float_value"] is not None and step is not None:
            yield Point(name, int(step), time, row["float_value"])
            continue
        is_made = False
        for made in _made(row, own):  # one in memory at a time
            is_made = True
            if made is None:
                left_out[kind] += 1
                continue
            called, content, suffix = made
            yield Media(called, int(step or 0), time, content, suffix)
        if not is_made:
            left_out[kind] += 1


def _made(row: dict[str, Any], own: Path) -> Iterator[tuple[str, bytes, str] | None]:
    """Yield name, content and suffix of each file that a value becomes; None: not readable."""
    name, histogram, file = row["attribute_path"], row["histogram_value"], row["file_value"]
    if isinstance(histogram, dict) and histogram.get("type") == "COUNTING":
        content = histogram_of(histogram.get("edges"), histogram.get("values"))
        yield (name, content, "histogram.json") if content else None
    elif isinstance(file, dict) and row["attribute_type"] in FILES:
        path = str(file.get("path"))
        for member in _below(own, path) if row["attribute_type"] == FILE_SET else [path]:
            content = None if own.parent.is_symlink() else read(own, member)
            if content is None:
                yield None
                continue
            suffix = named_suffix_of(member, content)
            below = member.removeprefix(path)  # path within a file_set
            yield f"{name}{below}".removesuffix(f".{suffix}"), content, suffix


def _below(own: Path, path: str) -> list[str]:
    """Return the paths of the files in a folder, at most MOST."""
    folder = inside(own, path)
    if folder is None:
        return [path]
    files = islice((file for file in folder.rglob("*") if not file.is_dir()), MOST)
    return sorted(f"{path}/{file.relative_to(folder).as_posix()}" for file in files)


def _rows(
    files: list[Path], columns: list[str], kinds: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows in batches, only those of the given types if there are any."""
    for file in files:
        try:
            with parquet.ParquetFile(file) as opened:
                there = [name for name in columns if name in opened.schema_arrow.names]
                for batch in opened.iter_batches(ROWS, columns=there):
                    lacking = dict.fromkeys(name for name in columns if name not in there)
                    for row in batch.to_pylist():
                        if kinds is None or row["attribute_type"] in kinds:
                            yield row | lacking
        except (pyarrow.ArrowException, OSError, KeyError) as error:
            raise Damaged(f"{file} is damaged: {' '.join(str(error).split())}") from error


def _plain(value: Any) -> object:
    return value.isoformat() if isinstance(value, datetime) else value


def _seconds(moment: str | None) -> float | None:
    if moment is None:
        return None
    read = datetime.fromisoformat(moment)
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
