"""Sending later: runs that lie in folders, whole or half, once or once more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.api_client.errors import ApiError
from halfstep.telemetry import uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.run_folder import is_dead, last_step, read_run, remember_last_step
from halfstep.telemetry.sender import RunSending
from halfstep.telemetry.spool import spool_of

TRIES = 6  # at a server that is away, for about half a minute


class Sent(NamedTuple):
    """page: where the run is to be seen; None: nothing of it was wanted.  is_over: it has ended.

    problems: what could not be sent, a line each.
    """

    page: str | None
    is_over: bool
    problems: tuple[str, ...] = ()


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs at or below a folder, but for what lies within a run's."""
    if (folder / "run.json").is_file():
        return [folder]
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except PermissionError:  # whoever sends it reports why it cannot be read
        return [folder]
    return [run for each in below for run in run_folders(each)]


def upload(
    folder: Path,
    ingest: Ingest,
    say: Callable[[str], None],
    wait: Callable[[float], None],
    *,
    with_checkpoints: bool = False,
    delete: bool = False,
) -> Sent:
    """Send the current content of a run's folder.

    wait: called with seconds between two tries.  delete: the spool of what is over and sent.
    Raises ApiError, of a server that is still away too.
    """
    with uploader.alone(folder) as is_alone:
        if not is_alone:
            say(f"{folder} is being sent by the uploader of its training")
            return Sent(None, is_over=False)
        sending = RunSending(folder, ingest, say, with_checkpoints=with_checkpoints)
        for files in _attempts(folder):
            _close_if_dead(files)
        _send(sending, wait)
        over = [files for files in _attempts(folder) if _is_over(files)]
        if delete:
            for files in over:
                if sending.is_sent(files.attempt):
                    _delete_spool(files)
        is_over = len(over) == len(_attempts(folder))
        return Sent(sending.page, is_over, tuple(sending.problems))


def _send(sending: RunSending, wait: Callable[[float], None]) -> None:
    for tried in range(TRIES):
        try:
            sending.send()
        except ApiError as error:
            is_lasting = 400 <= error.status < 500 and error.status not in (408, 425, 429)
            if is_lasting or tried == TRIES - 1:
                raise
            wait(uploader.backoff(tried + 1))
        else:
            return


def _attempts(folder: Path) -> list[AttemptFiles]:
    return [AttemptFiles(folder, each["attempt"]) for each in read_run(folder)["attempts"]]


def _is_over(files: AttemptFiles) -> bool:
    """Return whether an attempt writes no more; one of another machine may, unless it says so."""
    return files.outcome.exists() or is_dead(_written(files))


def _close_if_dead(files: AttemptFiles) -> None:
    """Write down that an attempt's process is gone; it may live on in another container."""
    written = _written(files)
    if is_dead(written):
        uploader.Training(files, written["pid"], written["pid_started"]).close()


def _written(files: AttemptFiles) -> dict[str, Any]:
    """Return what run.json says of an attempt."""
    attempts: list[dict[str, Any]] = read_run(files.folder)["attempts"]
    return next(attempt for attempt in attempts if attempt["attempt"] == files.attempt)


def _delete_spool(files: AttemptFiles) -> None:
    """Delete what an attempt spooled; which step it came to, a later attempt has to know."""
    remember_last_step(files.folder, last_step(AttemptFiles(files.folder, files.attempt + 1)))
    for _, path in spool_of(files.spool, files.attempt):
        path.unlink()
