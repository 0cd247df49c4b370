"""`halfstep upload`: sends runs from their folders; may be repeated for partially sent runs."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from halfstep.api_client.errors import ApiError
from halfstep.sidecar.process import LOCK as SIDECAR_LOCK
from halfstep.telemetry import uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import AttemptEntry
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.run_folder import is_dead, last_step, read_run, remember_last_step
from halfstep.telemetry.sender import SIDECAR_SECONDS, RunSending
from halfstep.telemetry.spool import spool_of

SIDECAR_POLL_SECONDS = 0.1
TRIES = 6  # at an unreachable server, over about half a minute


class Sent(NamedTuple):
    """Result of `upload`."""

    # URL of the run's page; None: the server accepted nothing, or another uploader is running.
    page: str | None
    is_over: bool  # the run has ended
    problems: tuple[str, ...] = ()  # what could not be sent, a line each


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder in order of start; none is in another's folder.

    A link is followed only to the folder of a run.
    """
    return sorted(_run_folders(folder), key=_started)


def _started(folder: Path) -> str:
    """Return when a run was started, in ISO 8601; "" if it cannot be read."""
    try:
        return read_run(folder).started
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""


def _run_folders(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file():
        return [folder]
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir())
    except PermissionError:  # `upload` reports why it cannot be read
        return [folder]
    followed = [path for path in below if not path.is_symlink() or (path / "run.json").is_file()]
    return [run for path in followed for run in _run_folders(path)]


def upload(
    folder: Path,
    ingest: Ingest,
    say: Callable[[str], None],
    wait: Callable[[float], None],
    *,
    tell: Callable[[str], None] | None = None,
    with_checkpoints: bool = False,
    delete: bool = False,
) -> Sent:
    """Send the current content of a run's folder.

    wait: called with seconds between two tries.  tell: called with what is no problem; by default
    that is said, too.  delete: delete the spools of attempts that are over and sent.

    Raises ApiError, also if the server is still unreachable after all tries.
    """
    with uploader.upload_lock(folder) as is_acquired:
        if not is_acquired:
            say(f"{folder} is already being sent by the uploader of its training process")
            return Sent(None, is_over=False)
        sending = RunSending(
            folder, ingest, say, tell=tell, with_checkpoints=with_checkpoints, sidecar_seconds=0.0
        )
        for files in _attempts(folder):
            _close_if_dead(files)
            if _is_over(files):
                _await_sidecar(files, wait)
        _send(sending, wait)
        over = [files for files in _attempts(folder) if _is_over(files)]
        if delete:
            for files in over:
                if sending.is_sent(files.attempt):
                    _delete_spool(files)
        is_over = len(over) == len(_attempts(folder))
        return Sent(sending.page, is_over, tuple(sending.problems))


def _send(sending: RunSending, wait: Callable[[float], None]) -> None:
    for retry in range(TRIES):
        try:
            sending.send()
        except ApiError as error:
            is_permanent = 400 <= error.status < 500 and error.status not in (408, 425, 429)
            if is_permanent or retry == TRIES - 1:
                raise
            wait(uploader.backoff(retry + 1))
        else:
            return


def _attempts(folder: Path) -> list[AttemptFiles]:
    return [AttemptFiles(folder, row.attempt) for row in read_run(folder).attempts]


def _is_over(files: AttemptFiles) -> bool:
    """Return whether an attempt has ended; on another machine only its outcome file shows that."""
    return files.outcome.exists() or is_dead(_attempt_entry(files))


def _close_if_dead(files: AttemptFiles) -> None:
    """Write the outcome of an attempt whose process is known to be dead.

    A process in another container may still be running.
    """
    entry = _attempt_entry(files)
    if is_dead(entry):
        uploader.Training(files, entry.pid, entry.pid_started).close()


def _attempt_entry(files: AttemptFiles) -> AttemptEntry:
    """Return the entry of an attempt in run.json."""
    attempts = read_run(files.folder).attempts
    return next(attempt for attempt in attempts if attempt.attempt == files.attempt)


def _await_sidecar(files: AttemptFiles, wait: Callable[[float], None]) -> None:
    """Wait for the end of an attempt's sidecar, which child processes may keep alive."""
    lock = FolderLock(files.folder / SIDECAR_LOCK)
    for _ in range(round(SIDECAR_SECONDS / SIDECAR_POLL_SECONDS)):
        if not lock.is_held():
            return
        wait(SIDECAR_POLL_SECONDS)


def _delete_spool(files: AttemptFiles) -> None:
    """Delete an attempt's spools and store its last step, which later attempts need."""
    remember_last_step(files.folder, last_step(AttemptFiles(files.folder, files.attempt + 1)))
    for spool in (files.spool, files.sidecar):
        for _, path in spool_of(spool, files.attempt):
            path.unlink()
