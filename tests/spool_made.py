"""Events as JSON objects, and spools with invalid contents."""

import json
from pathlib import Path
from typing import Any

import msgspec

from halfstep.telemetry.event_codec import parse
from halfstep.telemetry.events import Artifact, Checkpoint, CheckpointFile, Event
from halfstep.telemetry.spool import EVENT, FILE_HEADER, MAGIC, VERSION, frame


def event_of(fields: dict[str, Any]) -> Event:
    """Return the event with these fields."""
    return parse(msgspec.to_builtins(fields, enc_hook=float))  # of numpy's numbers


def fields_of(item: Any) -> Any:
    """Return an event as a JSON object with Python floats; steps and similar arrays unchanged."""
    return msgspec.to_builtins(item) if isinstance(item, Event) else item


def events_of(items: list[Any]) -> list[dict[str, Any]]:
    """Return the events among a spool's items, as JSON objects."""
    return [fields_of(item) for item in items if isinstance(item, Event)]


def spool_raw(folder: Path, attempt: int, *payloads: bytes, kind: int = EVENT) -> Path:
    """Append complete frames with these payloads to the first file of an attempt's spool."""
    path = folder / f"{attempt}-0.spool"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION))
    with path.open("ab") as file:
        file.write(b"".join(frame(kind, payload) for payload in payloads))
    return path


def spool_anything(folder: Path, attempt: int, *events: Any) -> Path:
    """Append events with any contents."""
    return spool_raw(folder, attempt, *(json.dumps(event).encode() for event in events))


def artifact_of(fields: Artifact | dict[str, Any]) -> Artifact:
    """Return the event of an artifact; its path may be missing."""
    if isinstance(fields, Artifact):
        return fields
    names = Artifact.__struct_fields__
    return Artifact(**{"path": None} | {k: v for k, v in fields.items() if k in names})  # type: ignore[arg-type]


def checkpoint_of(fields: dict[str, Any]) -> Checkpoint:
    """Return the event of a checkpoint; paths of its files may be missing."""
    files = [CheckpointFile(**{"path": None} | file) for file in fields["files"]]  # type: ignore[arg-type]
    rest = {k: v for k, v in fields.items() if k not in ("event", "files")}
    return Checkpoint(files=files, **rest)
