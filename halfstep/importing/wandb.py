"""Import of W&B's offline runs from the log `run-<id>.wandb` in each run's folder.

    file     ":W&B", u16 magic, u8 version; then blocks of 32 KiB, the first less these 7 bytes
    block    records: u32 crc32(type + data), u16 length, u8 type (1 whole, 2 first, 3 middle,
             4 last part), data; a rest of under 7 bytes is zeros

Each record is a message `Record` of wandb_internal.proto, of which the fields below are read. wandb
itself reads the log in Go and no longer has a Python module for it.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from halfstep.importing.media import histogram_of, read, table_of
from halfstep.importing.protobuf import double, fields, to_signed, zigzag
from halfstep.importing.source import Damaged, Media, Point, SourceRun
from halfstep.telemetry.attempt_messages import WatchedStatus
from halfstep.telemetry.plain_json import JsonObject

HEADER, MAGIC = Struct("<4sHB"), (b":W&B", 0xBEE1)
RECORD = Struct("<IHB")
BLOCK_BYTES = 32 * 2**10
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4

#: Types of values that are files, below `files` in the run's folder.
MEDIA = ("image-file", "images/separated", "audio-file")
TABLES = ("table-file", "incremental-table-file")

HISTORY, SUMMARY, CONFIG, RUN, EXIT = 2, 3, 5, 17, 18  # field numbers of Record


def runs(path: Path) -> Iterator[SourceRun | Damaged]:
    """Yield the runs at or below a folder, or that of one file. A resumed run has several files."""
    by_id: dict[str, list[Path]] = {}
    files = [path] if path.is_file() else sorted(path.rglob("*.wandb"))
    for file in sorted(files, key=lambda file: file.parent.name):
        by_id.setdefault(file.stem.removeprefix("run-"), []).append(file)
    for files in by_id.values():
        try:
            yield _source_run(files)
        except (Damaged, ValueError) as error:
            yield error if isinstance(error, Damaged) else Damaged(f"{files[0]}: {error}")


def _source_run(files: list[Path]) -> SourceRun:
    run: dict[int, list[Any]] = {}
    config: JsonObject = {}
    status: WatchedStatus | None = None
    for kind, message in _descriptions(files):
        if kind == RUN:
            run = run or message
            configuration = message.get(4, [])
            config |= _settings(fields(configuration[0])) if configuration else {}
        elif kind == CONFIG:
            config |= _settings(message)
        elif kind == EXIT:
            status = "finished" if to_signed(message.get(1, [0])[0]) == 0 else "failed"
    if not run:
        raise Damaged(f"{files[0]} has no run record")
    identity = "/".join(_text(run, field) for field in (2, 3, 1))  # entity, project, id
    left_out: Counter[str] = Counter()
    config.pop("_wandb", None)
    return SourceRun(
        identity=f"wandb:{identity}",
        fingerprint=" ".join(f"{file.parent.name}:{file.stat().st_size}" for file in files),
        name=_text(run, 8) or _text(run, 1),
        project=_text(run, 3) or None,
        config=config,
        tags=tuple(tag.decode() for tag in run.get(10, [])),
        started=_seconds(fields(run[17][0])) if 17 in run else None,
        host=_text(run, 13),
        status=status or "terminated",
        points=partial(_points, files, left_out),
        left_out=left_out,
    )


def _descriptions(files: list[Path]) -> Iterator[tuple[int, dict[int, list[Any]]]]:
    """Yield the records that describe a run; damage is reported by the pass over its points."""
    for file in files:
        try:
            for record in _records(file):
                for kind in (RUN, CONFIG, EXIT):
                    if kind in record:
                        yield kind, fields(record[kind][0])
        except Damaged:
            continue


def _points(files: list[Path], left_out: "Counter[str]") -> Iterator[Point | Media]:
    left_out.clear()
    for file in files:
        for record in _records(file):
            if HISTORY in record:
                yield from _row(fields(record[HISTORY][0]), file.parent / "files", left_out)


def _row(
    history: dict[int, list[Any]], files: Path, left_out: "Counter[str]"
) -> Iterator[Point | Media]:
    """Yield the numbers and media of one row of a run's history."""
    items = dict(_item(fields(item)) for item in history.get(1, []))
    step_record = fields(history[2][0]) if 2 in history else {}
    step = int(items.get(("_step",), to_signed(step_record.get(1, [0])[0])))
    time = items.get(("_timestamp",))
    inside: dict[tuple[str, ...], dict[str, Any]] = {}  # by path, the values directly below it
    for path, value in items.items():
        inside.setdefault(path[:-1], {})[path[-1]] = value
    kinds = {path: own["_type"] for path, own in inside.items() if "_type" in own}
    for path, kind in kinds.items():
        own = inside[path]
        if made := _made(kind, own, files):
            suffix, content = made
            yield Media(".".join(path), step, time, content, suffix)
            continue
        named = own.get("filenames", [own.get("path")])
        is_read = kind in MEDIA and isinstance(named, list)
        contents = [read(files, str(place)) for place in named] if is_read else [None]
        yield from (Media(".".join(path), step, time, data) for data in contents if data)
        left_out.update(str(kind) for data in contents if not data)
    for path, value in items.items():
        if path[0].startswith("_") or any(path[:end] in kinds for end in range(len(path) + 1)):
            continue
        if value in ("NaN", "Infinity", "-Infinity"):
            value = float(value)
        if isinstance(value, int | float):
            yield Point(".".join(path), step, time, float(value))
        else:
            left_out["text" if isinstance(value, str) else "list"] += 1


def _made(kind: Any, value: Mapping[str, object], files: Path) -> tuple[str, bytes] | None:
    """Return suffix and content of a converted histogram or table; None for other types."""
    content = None
    if kind == "histogram":
        content = histogram_of(value.get("bins"), value.get("values"))
        return ("histogram.json", content) if content else None
    if kind in TABLES and (read_ := read(files, str(value.get("path")))):
        try:
            table = json.loads(read_)
        except (ValueError, RecursionError):
            return None
        if isinstance(table, dict):
            content = table_of(table.get("columns"), table.get("data"))
    return ("csv", content) if content else None


def _item(item: dict[int, list[Any]]) -> tuple[tuple[str, ...], Any]:
    """Return the path and the value of an item of a history row or a configuration."""
    name = tuple(part.decode() for part in item.get(2, [])) or (_text(item, 1),)
    if 16 in item:
        return name, json.loads(item[16][0])
    if 6 in item:
        return name, double(item[6][0])
    if 5 in item:
        return name, zigzag(item[5][0])
    if 4 in item:
        return name, bool(item[4][0])
    return name, json.loads(item[8][0]) if 8 in item else _text(item, 7)


def _settings(update: dict[int, list[Any]]) -> dict[str, object]:
    """Return the values that a ConfigRecord sets."""
    set_items = dict(_item(fields(item)) for item in update.get(1, []))
    return {".".join(path): value for path, value in set_items.items()}


def _seconds(timestamp: dict[int, list[Any]]) -> float:
    seconds, nanoseconds = timestamp.get(1, [0])[0], timestamp.get(2, [0])[0]
    return float(seconds + nanoseconds / 1e9)


def _text(message: dict[int, list[Any]], field: int) -> str:
    return message[field][-1].decode() if field in message else ""


# ---- The log -----------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[dict[int, list[Any]]]:
    """Yield the records of a log; a truncated one, left by a killed process, ends it."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or HEADER.unpack(header)[:2] != MAGIC:
            raise Damaged(f"{path} is not a W&B log")
        parts: list[bytes] = []
        while chunk := _chunk(file, path):
            kind, data = chunk
            parts = [data] if kind in (WHOLE, FIRST) else [*parts, data]
            if kind in (WHOLE, LAST):
                try:
                    yield fields(b"".join(parts))
                except ValueError as error:
                    raise Damaged(f"{path} is damaged before byte {file.tell():,}") from error


def _chunk(file: BinaryIO, path: Path) -> tuple[int, bytes] | None:
    at = file.tell()
    if (rest := BLOCK_BYTES - at % BLOCK_BYTES) < RECORD.size:
        at = file.seek(at + rest)
    header = file.read(RECORD.size)
    if len(header) < RECORD.size:
        return None
    checksum, length, kind = RECORD.unpack(header)
    data = file.read(length)
    if len(data) < length:
        return None
    if checksum != zlib.crc32(bytes([kind]) + data) or kind not in (WHOLE, FIRST, MIDDLE, LAST):
        raise Damaged(f"{path} is damaged at byte {at:,}")
    return kind, data
