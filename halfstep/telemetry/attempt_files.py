"""Paths of the files through which an attempt's supervisor and training process communicate.

halfstep.telemetry.attempt_messages has their content. This module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttemptFiles:
    """Paths of an attempt's files in the run's folder. All attempts share one spool folder."""

    folder: Path
    attempt: int

    @property
    def job(self) -> Path:
        """Job description, the first file that the training process reads."""
        return self.folder / f"job-{self.attempt}.json"

    @property
    def control(self) -> Path:
        """Control requests of users, read between steps."""
        return self.folder / f"control-{self.attempt}.json"

    @property
    def lease(self) -> Path:
        """Time at which the lease of the attempt expires."""
        return self.folder / f"lease-{self.attempt}.json"

    @property
    def rendezvous(self) -> Path:
        """Rendezvous of the ranks: address of the store of rank 0."""
        return self.folder / f"rendezvous-{self.attempt}.json"

    @property
    def outcome(self) -> Path:
        """Outcome of the attempt."""
        return self.folder / f"outcome-{self.attempt}.json"

    @property
    def exit_code(self) -> Path:
        """One byte: the exit code of a watched process, if Python could not record it in time."""
        return self.folder / f"exit-code-{self.attempt}"

    @property
    def crash(self) -> Path:
        """Traceback that faulthandler wrote when a fatal signal ended a watched process."""
        return self.folder / f"crash-{self.attempt}"

    @property
    def work(self) -> Path:
        """Working directory of a command that specifies none."""
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        """Folder of temporary files, deleted with the attempt."""
        return self.folder / "tmp"

    @property
    def spool(self) -> Path:
        """Folder of the telemetry spool."""
        return self.folder / "spool"

    @property
    def sidecar(self) -> Path:
        """Folder of the sidecar's spool: log lines and system samples of a watched script."""
        return self.folder / "sidecar"
