"""Writes what no honest training spools, past the writer that would refuse it."""

import json
from pathlib import Path
from typing import Any

from halfstep.telemetry.spool import EVENT, FILE_HEADER, MAGIC, VERSION, frame


def spool_raw(folder: Path, attempt: int, *payloads: bytes, kind: int = EVENT) -> Path:
    """Append whole frames with these payloads to the first file of an attempt's spool."""
    path = folder / f"{attempt}-0.spool"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION))
    with path.open("ab") as file:
        file.write(b"".join(frame(kind, payload) for payload in payloads))
    return path


def spool_anything(folder: Path, attempt: int, *events: Any) -> Path:
    """Append events, whatever they hold."""
    return spool_raw(folder, attempt, *(json.dumps(event).encode() for event in events))
