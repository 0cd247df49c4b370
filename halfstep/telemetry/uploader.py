"""The uploader: a process of its own that sends a watched run to a server, while it is written.

    python -P -m halfstep.telemetry.uploader FOLDER ATTEMPT ORIGIN

`halfstep.watch` starts it. It is nobody's child and in a session of its own, so that it outlives
the training, however that ends; it then sends what is left. Of a process that is gone without
having written down how it ended, it says just that. A run's folder has one uploader at a time: the
one of its newest attempt, which also sends what is left of those before.
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

from halfstep import process
from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials
from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import FolderLock

if TYPE_CHECKING:
    from halfstep.telemetry.sender import RunSending

LOCK, LOG = "uploader.lock", "uploader.log"
LOOK_SECONDS = 0.5  # between two looks at what was written
LIFE_SECONDS = 0.2  # between two looks whether the training lives
LONGEST_SECONDS = 30.0  # between two tries at a server that is away
MENDING_SECONDS = 60.0  # between two tries of what is refused
#: Answers about what was sent: tried again only because a script may configure its run anew.
REFUSALS = (400, 413, 415, 422)
PATIENCE_SECONDS = 600.0  # with such a server once the training has ended
NICENESS = 10  # the training goes first


def start(
    files: AttemptFiles, server: Credentials, patience_seconds: float | None = None
) -> str | None:
    """Start the uploader of an attempt; return the address of the run's page.

    "" if the server has refused, which the uploader says.  patience_seconds: with a server that
    has yet to tell it; after that the uploader will print it, and None is returned.  None: nobody
    wants to know. Raises OSError if no process can be started.
    """
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HALFSTEP_URL": server.url,
        "HALFSTEP_TOKEN": server.token,
        "OPENBLAS_NUM_THREADS": "1",  # numpy need not take a stack for every processor
    }
    command = [sys.executable, "-P", "-m", "halfstep.telemetry.uploader"]
    with subprocess.Popen(
        [*command, str(files.folder), str(files.attempt), server.origin],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if patience_seconds is None else subprocess.PIPE,
        start_new_session=True,
    ) as starter:  # which forks and ends at once: a child would show up in the script's os.wait()
        if starter.stdout is None:
            return None
        ready, _, _ = select.select([starter.stdout], [], [], patience_seconds)
        return os.read(starter.stdout.fileno(), 4096).decode() if ready else None


def is_at_work(folder: Path) -> bool:
    """Return whether some process sends this run."""
    with alone(folder) as is_alone:
        return not is_alone


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold the lock of the process that sends this run; yields False if another holds it."""
    lock = FolderLock(folder / LOCK)
    try:
        yield lock.acquire()
    finally:
        lock.release()


@contextmanager
def succeeding(training: "Training") -> Iterator[None]:
    """Hold that lock, once the uploader of an earlier attempt has released it."""
    while True:
        with alone(training.files.folder) as is_alone:
            if is_alone:
                yield
                return
        time.sleep(LIFE_SECONDS)


class Training:
    """The process that writes an attempt, as whoever only reads can know of it."""

    def __init__(self, files: AttemptFiles, pid: int, since: int | None) -> None:
        """since: when that process began, as halfstep.process has it."""
        self.files, self._pid, self._since = files, pid, since
        self.has_died = threading.Event()

    def is_over(self) -> bool:
        """Return whether the attempt writes no more, and how it ended is known if it ever is."""
        from halfstep.telemetry.run_folder import read_outcome

        lives = self.lives()  # before its outcome, which it writes last
        return not lives or read_outcome(self.files, lives=lives) is not None

    def lives(self) -> bool:
        """Return whether the process lives."""
        return process.lives(self._pid, self._since)

    def close(self) -> None:
        """Write down that the process has ended, if it is gone and did not do so itself."""
        from halfstep.session.exit_hooks import crash_of
        from halfstep.telemetry.run_folder import last_step, write_outcome

        # Asked in this order: what it wrote in between is there.
        if self._since is not None and not self.lives() and not self.files.outcome.exists():
            following = AttemptFiles(self.files.folder, self.files.attempt + 1)
            code, error = crash_of(self.files.crash) or (None, None)
            status = "terminated" if code else "vanished"
            write_outcome(self.files, status, last_step(following), error, code)

    def await_death(self, then: Callable[[], None]) -> None:
        """Wait for the process's end, and call something."""
        while self.lives():
            time.sleep(LIFE_SECONDS)
        then()
        self.has_died.set()


class Voice:
    """Says each sentence once: to the script's stderr while that lives, and into a log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._is_awaited = True
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Say something, if it was not said."""
        if text in self._said:
            return
        self._said.add(text)
        with suppress(OSError):  # a terminal that has gone, a full disk
            os.write(2, f"halfstep: {text}\n".encode())
        with suppress(OSError), self._log.open("a") as log:
            log.write(f"{time.strftime('%F %T')} {text}\n")

    def let_go(self) -> None:
        """Go on in the log alone. A terminal may stay: nobody waits for its end, as of a pipe."""
        if not os.isatty(2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def announce(self, page: str) -> None:
        """Send the page's address to the script, or print it if that no longer waits."""
        try:
            is_heard = self._is_awaited and os.write(1, page.encode())
        except BrokenPipeError:
            is_heard = False
        if not is_heard:
            self.say(f"the run is at {page}")
        self.release()

    def release(self) -> None:
        """Let the script wait no longer."""
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
    """Send what a training writes, until it is over and all is sent, or nobody can be reached.

    announce: told the run's page, once.  release: called when there is to be none for now.
    """
    from halfstep.api_client.errors import ApiError
    from halfstep.telemetry.run_folder import read_run

    tries, over_since, is_announced = 0, None, False
    while read_run(sending.folder)["attempts"][-1]["attempt"] == training.files.attempt:
        # Asked before: what was written until then is there to be sent.
        if (is_over := training.is_over()) and over_since is None:
            over_since = clock()
            training.close()
        try:
            sending.send()
        except ApiError as error:
            waited = 0.0 if over_since is None else clock() - over_since
            if waited > patience_seconds or (is_over and error.status in REFUSALS):
                say(f"{error}; `halfstep upload {sending.folder}` sends the rest")
                return
            if error.status in (401, 403):
                say(f"the server refuses the token ({error}); everything is kept and tried again")
                sending.use_stored_token()
                delay = MENDING_SECONDS
            elif error.status in REFUSALS:
                say(f"the server refuses the run ({error}); everything is kept")
                delay = MENDING_SECONDS
            else:
                say(f"the server takes nothing now ({error}); everything is kept and tried again")
                delay = backoff(tries)
            if error.status:
                release()
            tries += 1
        else:
            tries, delay = 0, LOOK_SECONDS
            if sending.page and not is_announced:
                is_announced = True
                announce(sending.page)
            if is_over:
                return
        # Its death is news: whatever we wait for, try at once.
        if over_since is None:
            training.has_died.wait(delay)
        else:
            time.sleep(delay)


def backoff(tries: int) -> float:
    """Return the seconds until the next attempt: exponential, with jitter."""
    longest = min(LONGEST_SECONDS, LOOK_SECONDS * 2.0 ** min(tries, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def main() -> None:
    """Run the uploader, detached, until everything is sent."""
    if os.fork():
        os._exit(0)
    folder, attempt, origin = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server = credentials.known()
    if server is None:
        sys.exit("HALFSTEP_URL and HALFSTEP_TOKEN are not set")
    server = server._replace(origin=origin)  # it came by a variable from where it stands
    os.nice(NICENESS)
    # After the fork, for they take their time.
    from halfstep.telemetry.ingest import Ingest
    from halfstep.telemetry.run_folder import read_run
    from halfstep.telemetry.sender import RunSending

    voice = Voice(folder / LOG)
    try:
        [written] = [each for each in read_run(folder)["attempts"] if each["attempt"] == attempt]
        training = Training(AttemptFiles(folder, attempt), written["pid"], written["pid_started"])
        threading.Thread(target=training.await_death, args=[voice.let_go], daemon=True).start()
        with succeeding(training), Ingest(server) as ingest:
            sending = RunSending(folder, ingest, voice.say)
            follow(sending, training, voice.say, announce=voice.announce, release=voice.release)
    except Exception as error:  # of ours, or a folder that was deleted: no traceback for the script
        text = f"{type(error).__name__}: {error}; `halfstep upload {folder}` sends the rest"
        voice.say(f"the uploader has failed: {text}")


if __name__ == "__main__":
    main()
