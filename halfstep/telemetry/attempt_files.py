"""The files by which the supervisor and the training of an attempt meet, in the run's folder."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AttemptFiles:
    """Where they lie. The spool is one folder for all attempts."""

    folder: Path
    attempt: int

    @property
    def job(self) -> Path:
        """What the training reads first."""
        return self.folder / f"job-{self.attempt}.json"

    @property
    def control(self) -> Path:
        """What people want of it, looked at between steps; see spool.py."""
        return self.folder / f"control-{self.attempt}.json"

    @property
    def lease(self) -> Path:
        """Until when it may train."""
        return self.folder / f"lease-{self.attempt}.json"

    @property
    def meeting(self) -> Path:
        """Where its ranks meet: {host, port} of the first one's store."""
        return self.folder / f"meeting-{self.attempt}.json"

    @property
    def outcome(self) -> Path:
        """How it ended."""
        return self.folder / f"outcome-{self.attempt}.json"

    @property
    def exit_code(self) -> Path:
        """One byte, the exit code of a watched process that Python could not learn in time."""
        return self.folder / f"exit-code-{self.attempt}"

    @property
    def crash(self) -> Path:
        """What Python wrote of a watched process that a fatal signal ended."""
        return self.folder / f"crash-{self.attempt}"

    @property
    def work(self) -> Path:
        """Where a command works that names no folder."""
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        """The folder of its temporary files, gone with the attempt."""
        return self.folder / "tmp"

    @property
    def spool(self) -> Path:
        """The folder of its telemetry."""
        return self.folder / "spool"


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
