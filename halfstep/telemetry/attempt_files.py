"""Paths of the files through which an attempt's supervisor and training process communicate.

halfstep.telemetry.attempt_messages has their content. This module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttemptFiles:
    """Paths of an attempt's files. All attempts share one spool folder."""

    folder: Path  # that the attempt's processes write
    attempt: int
    # Folder of the files that only the supervisor writes; None: the same.
    control_folder: Path | None = None

    @property
    def job(self) -> Path:
        """Job description, the first file that the training process reads."""
        return self._read_only / f"job-{self.attempt}.json"

    @property
    def control(self) -> Path:
        """Control requests of users, read between steps."""
        return self._read_only / f"control-{self.attempt}.json"

    @property
    def lease(self) -> Path:
        """Time at which the lease of the attempt expires."""
        return self._read_only / f"lease-{self.attempt}.json"

    @property
    def _read_only(self) -> Path:
        return self.control_folder or self.folder

    @property
    def description(self) -> Path:
        """Source and git state of a command."""
        return self.folder / f"description-{self.attempt}.json"

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
