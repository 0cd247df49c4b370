"""The uploader: a separate process that sends a watched run to a server while it is written.

    python -P -m halfstep.telemetry.uploader FOLDER ATTEMPT ORIGIN

`halfstep.watch` starts it. It is detached, in its own session, so it outlives the training process
and sends the rest after that has ended. If the process died without writing its outcome, the
uploader writes one. A run's folder has one uploader at a time: that of its newest attempt, which
also sends the rest of earlier attempts.
"""

import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep import batch_system, process
from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials
from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import FolderLock

if TYPE_CHECKING:
    from halfstep.telemetry.attempt_messages import WatchedStatus
    from halfstep.telemetry.sender import RunSending

LOCK, LOG = "uploader.lock", "uploader.log"
POLL_SECONDS = 0.5  # between two checks for new data
LIFE_SECONDS = 0.2  # between two checks whether the training process is alive
LONGEST_SECONDS = 30.0  # between two tries at an unreachable server
MENDING_SECONDS = 60.0  # between two tries of a rejected request
#: Status codes about the content sent: retried only because a script may change its configuration.
REJECTIONS = (400, 413, 415, 422)
PATIENCE_SECONDS = 600.0  # time to retry after the training has ended
NICENESS = 10  # the training has precedence


def start(
    files: AttemptFiles,
    server: Credentials,
    patience_seconds: float | None = None,
    stderr: int | None = None,
) -> str | None:
    """Start the uploader of an attempt; return the URL of the run's page.

    Returns "" if the server refused the run; the uploader prints the reason.  patience_seconds:
    how long to wait for the URL; after that the uploader prints it, and None is returned; None:
    do not wait.  stderr: the descriptor for its messages, by default this process's.  Raises
    OSError if no process can be started.
    """
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HALFSTEP_URL": server.url,
        "HALFSTEP_TOKEN": server.token,
        "OPENBLAS_NUM_THREADS": "1",  # numpy then allocates no stack per processor
    }
    command = [sys.executable, "-P", "-m", "halfstep.telemetry.uploader"]
    with subprocess.Popen(
        [*command, str(files.folder), str(files.attempt), server.origin],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if patience_seconds is None else subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as starter:  # which forks and ends at once: a child would show up in the script's os.wait()
        if starter.stdout is None:
            return None
        ready, _, _ = select.select([starter.stdout], [], [], patience_seconds)
        return os.read(starter.stdout.fileno(), 4096).decode() if ready else None


def is_uploading(folder: Path) -> bool:
    """Return whether a process is sending this run."""
    with upload_lock(folder) as is_acquired:
        return not is_acquired


@contextmanager
def upload_lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of the process that sends this run; yields False if another holds it."""
    lock = FolderLock(folder / LOCK)
    try:
        yield lock.acquire()
    finally:
        lock.release()


@contextmanager
def wait_for_upload_lock(training: "Training") -> Iterator[None]:
    """Hold the upload lock, once the uploader of an earlier attempt has released it."""
    while True:
        with upload_lock(training.files.folder) as is_acquired:
            if is_acquired:
                yield
                return
        time.sleep(LIFE_SECONDS)


class Training:
    """Process that writes an attempt, observed from another process."""

    def __init__(self, files: AttemptFiles, pid: int, since: int | None) -> None:
        """since: start time of the process, as returned by halfstep.process.started."""
        self.files, self._pid, self._since = files, pid, since
        self.has_died = threading.Event()

    def is_over(self) -> bool:
        """Return True once the attempt has an outcome or its process is dead."""
        from halfstep.telemetry.run_folder import read_outcome

        lives = self.lives()  # checked before the outcome, which the process writes last
        return not lives or read_outcome(self.files, lives=lives) is not None

    def lives(self) -> bool:
        """Return whether the process is alive."""
        return process.lives(self._pid, self._since)

    def close(self) -> None:
        """Write an outcome for the process if it is dead and wrote none itself.

        On a full disk none is written: call it again.
        """
        from halfstep.session.exit_files import crash_of, user_signal_of
        from halfstep.telemetry.run_folder import last_step, read_outcome, write_outcome

        # In this order: a live process may still write its outcome between the two checks.
        if self._since is not None and not self.lives() and read_outcome(self.files) is None:
            following = AttemptFiles(self.files.folder, self.files.attempt + 1)
            code, error = crash_of(self.files.crash) or (user_signal_of(self.files.crash), None)
            status: WatchedStatus = "terminated" if code else "vanished"
            with suppress(OSError):
                write_outcome(self.files, status, last_step(following), error, code)

    def await_death(self, then: Callable[[], None]) -> None:
        """Wait until the process has ended, then call `then`."""
        while self.lives():
            time.sleep(LIFE_SECONDS)
        then()
        self.has_died.set()


class UploaderLog:
    """Prints each message once: to the script's stderr while that runs, and to a log file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._is_awaited = True
        self._printed: set[str] = set()

    def say(self, text: str) -> None:
        """Print and log a message that was not printed before."""
        if text in self._printed:
            return
        self._printed.add(text)
        with suppress(OSError):  # a closed terminal
            os.write(2, f"halfstep: {text}\n".encode())
        with suppress(OSError), self._log.open("a") as log:
            log.write(f"{time.strftime('%F %T')} {text}\n")

    def detach_stderr(self) -> None:
        """Close an inherited stderr so that a reader of its pipe sees EOF; keep a terminal."""
        if not os.isatty(2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def announce(self, page: str) -> None:
        """Send the page's URL to the script, or print it if the script no longer waits."""
        try:
            is_sent = self._is_awaited and os.write(1, page.encode())
        except BrokenPipeError:
            is_sent = False
        if not is_sent:
            self.say(f"the run is at {page}")
        self.release()

    def release(self) -> None:
        """Close stdout, which ends the script's wait."""
        self._is_awaited = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def follow(
    sending: "RunSending",
    training: Training,
    say: Callable[[str], None],
    *,
    announce: Callable[[str], None] = lambda page: None,
    release: Callable[[], None] = lambda: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Send a run until it has ended and all is sent, or the server stays unreachable.

    announce: called once with the URL of the run's page.  release: called when the server
    responded with an error, so there is no page yet.
    """
    from halfstep.api_client.errors import ApiError
    from halfstep.session import sweep_point
    from halfstep.telemetry.run_folder import read_run

    tries, over_since, is_announced = 0, None, False
    while (run := read_run(sending.folder)).attempts[-1].attempt == training.files.attempt:
        # Checked before sending: everything written until the end is then sent.
        if is_over := training.is_over():
            over_since = clock() if over_since is None else over_since
            training.close()
        try:
            sending.send()
        except ApiError as error:
            waited = 0.0 if over_since is None else clock() - over_since
            if waited > patience_seconds or (is_over and error.status in REJECTIONS):
                say(f"{error}; `halfstep upload {sending.folder}` sends the rest")
                return
            if error.status in (401, 403):
                say(f"the server rejects the token ({error}); nothing is deleted, will retry")
                sending.use_stored_token()
                delay = MENDING_SECONDS
            elif error.status in REJECTIONS:
                say(f"the server rejects the run ({error}); nothing is deleted")
                delay = MENDING_SECONDS
            else:
                text = f"the server currently accepts no data ({error})" if error.status else error
                later = f"`halfstep upload {sending.folder}` sends the rest later"
                say(f"{text}; nothing is deleted, will retry; {later}")
                delay = backoff(tries)
            if error.status:
                release()
            tries += 1
        else:
            tries, delay = 0, POLL_SECONDS
            if sending.page and not is_announced:
                is_announced = True
                announce(sending.page)
            if sending.was_ended(training.files.attempt):
                sweep_point.note_end(run.id)
            if is_over and sending.is_over(training.files.attempt):
                return
        # When the process dies, try at once, whatever the delay.
        if over_since is None:
            training.has_died.wait(delay)
        else:
            time.sleep(delay)


def backoff(tries: int) -> float:
    """Return the seconds until the next attempt: exponential, with jitter."""
    longest = min(LONGEST_SECONDS, POLL_SECONDS * 2.0 ** min(tries, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def main() -> None:
    """Run the uploader, detached, until everything is sent."""
    if os.fork():
        os._exit(0)
    folder, attempt, origin = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server = credentials.find()
    if server is None:
        sys.exit("HALFSTEP_URL and HALFSTEP_TOKEN are not set")
    server = server._replace(origin=origin)  # the source of the token, not the variable
    os.nice(NICENESS)
    batch_system.ignore_signals()
    # After the fork: these imports are slow.
    from halfstep.telemetry.ingest import Ingest
    from halfstep.telemetry.run_folder import read_run
    from halfstep.telemetry.sender import RunSending

    log, training = UploaderLog(folder / LOG), None
    try:
        [entry] = [row for row in read_run(folder).attempts if row.attempt == attempt]
        training = Training(AttemptFiles(folder, attempt), entry.pid, entry.pid_started)
        threading.Thread(target=training.await_death, args=[log.detach_stderr], daemon=True).start()
        with wait_for_upload_lock(training), Ingest(server) as ingest:
            sending = RunSending(folder, ingest, log.say)
            follow(sending, training, log.say, announce=log.announce, release=log.release)
    except Exception as error:  # a bug, or a deleted folder: no traceback in the script's output
        if training and training.lives() and not folder.exists():
            return  # which writes it again, says so, and starts another uploader
        text = f"{type(error).__name__}: {error}; `halfstep upload {folder}` sends the rest"
        log.say(f"the uploader has failed: {text}")


if __name__ == "__main__":
    main()
