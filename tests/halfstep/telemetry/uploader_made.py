"""Shared helpers of the tests of uploader."""

import hashlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from halfstep.telemetry.run_folder import (
    open_run,
    write_outcome,
)
from halfstep.telemetry.spool import STEP_DTYPE, SpoolWriter
from tests.spool_made import event_of


class Writer:
    """Writes an attempt as `watch` does, but without a training."""

    opened: ClassVar[list[SpoolWriter]] = []

    def __init__(self, folder: Path, name: str = "it", **named: Any) -> None:
        run = name if (folder / name).exists() else None
        self.files = open_run(folder, name=name, run=run, **named)
        self.spool = SpoolWriter(self.files.spool, self.files.attempt, rotate_bytes=3000)
        self.opened.append(self.spool)
        self.step = 0

    def steps(self, count: int = 10) -> "Writer":
        for _ in range(count):
            records = np.zeros(10, STEP_DTYPE)
            records["step"] = range(self.step + 1, self.step + 11)
            self.step += 10
            self.spool.steps(records)
        return self

    def file(self, content: bytes, name: str = "a.txt", **checkpoint: Any) -> "Writer":
        """Write an artifact, or with further fields a checkpoint."""
        place = "checkpoints" if checkpoint else "artifacts"
        path = f"{place}/step-{self.step:08}/{name}"
        (self.files.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.files.folder / path).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        file = {"path": path, "size_bytes": len(content), "sha256": sha256}
        event = {"event": "artifact", "step": self.step, "name": name} | file
        if checkpoint:
            event = {"event": "checkpoint", "step": self.step, "reason": "script"}
            event |= {"files": [{"kind": "checkpoint"} | file]} | checkpoint
        self.spool.event(event_of(event))
        return self

    def finish(self, status: str = "finished") -> "Writer":
        self.spool.close()
        write_outcome(self.files, status, self.step)
        return self


def uploaders(folder: Path) -> list[psutil.Process]:
    """Return the uploaders of runs below a folder."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or []
        if "halfstep.telemetry.uploader" in words and any(str(folder) in word for word in words):
            found.append(each)
    return found
