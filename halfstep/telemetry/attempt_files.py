"""Paths of the files through which an attempt's supervisor and training process communicate.

halfstep.telemetry.attempt_messages has their content. This module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path


class _File:
    """Path in the folder of an attempt's files, by its name, with N for the attempt."""

    def __init__(self, name: str, *, is_read_only: bool = False) -> None:
        """is_read_only: only the supervisor writes it."""
        self._name, self._is_read_only = name, is_read_only

    def __get__(self, files: "AttemptFiles", owner: type) -> Path:
        folder = (self._is_read_only and files.control_folder) or files.folder
        return folder / self._name.replace("N", str(files.attempt))


@dataclass(frozen=True)
class AttemptFiles:
    """Paths of an attempt's files. All attempts share one spool folder."""

    folder: Path  # that the attempt's processes write
    attempt: int
    # Folder of the files that only the supervisor writes; None: the same.
    control_folder: Path | None = None

    #: Job description, the first file that the training process reads.
    job = _File("job-N.json", is_read_only=True)
    #: Control requests of users, read between steps.
    control = _File("control-N.json", is_read_only=True)
    #: Time at which the lease of the attempt expires.
    lease = _File("lease-N.json", is_read_only=True)
    #: Source and git state of a command.
    description = _File("description-N.json")
    #: Rendezvous of the ranks: address of the store of rank 0.
    rendezvous = _File("rendezvous-N.json")
    #: Outcome of the attempt.
    outcome = _File("outcome-N.json")
    #: One byte: the exit code of a watched process, if Python could not record it in time.
    exit_code = _File("exit-code-N")
    #: Traceback that faulthandler wrote when a fatal signal ended a watched process.
    crash = _File("crash-N")
    #: Working directory of a command that specifies none.
    work = _File("work")
    #: Folder of temporary files, deleted with the attempt.
    temporary = _File("tmp")
    #: Folder of the telemetry spool.
    spool = _File("spool")
    #: Folder of the sidecar's spool: log lines and system samples of a watched script.
    sidecar = _File("sidecar")
