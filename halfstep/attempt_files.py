"""The files by which the supervisor and the training of an attempt meet, in the run's folder."""

from dataclasses import dataclass
from pathlib import Path


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
    def outcome(self) -> Path:
        """How it ended."""
        return self.folder / f"outcome-{self.attempt}.json"

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
