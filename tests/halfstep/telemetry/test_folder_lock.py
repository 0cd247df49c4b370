"""Locks of run folders, with flock and on file systems without it."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.telemetry import folder_lock
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import STALE_SECONDS, FolderLock, OwnerFile
from halfstep.telemetry.run_folder import read_run
from tests.halfstep.telemetry.folder_lock_made import no_locks_library
from tests.halfstep.telemetry.ingest_made import IngestServer
from tests.halfstep.watching.watch_made import Written
from tests.site import until

#: Logs what it reads, and ends at the end of its input.
SCRIPT = """
import sys, halfstep
watch = halfstep.watch(folder=sys.argv[1], run="it")
print("ready", flush=True)
for line in sys.stdin:
    watch.log({line.strip(): 1.0})
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def no_locks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process without file locks."""
    return {**os.environ, "LD_PRELOAD": str(no_locks_library(tmp_path_factory.mktemp("c")))}


class Script:
    """A process that watches a run, and logs values that it is sent."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.receive("ready")

    def receive(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def log(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        self.receive("done")

    def end(self) -> str:
        return self.process.communicate(timeout=60)[1]


def read_logged(folder: Path) -> list[str]:
    return [event["name"] for event in Written(folder).of("metric")]


@pytest.mark.extended
@pytest.mark.slow
def test_without_flock_one_process_writes_a_run(tmp_path: Path, no_locks: dict[str, str]) -> None:
    """Without flock a second process is rejected, and can continue after the first one's end."""
    first = Script(tmp_path, no_locks)
    assert json.loads((tmp_path / "it" / "writer.lock.owner").read_text())["pid"] == (
        first.process.pid
    )
    second = Script(tmp_path, no_locks)
    second.log("lost")
    assert "not watching: " in second.end()
    first.log("a")
    first.end()
    assert not (tmp_path / "it" / "writer.lock.owner").exists()
    third = Script(tmp_path, no_locks)
    third.process.kill()
    third.end()
    fourth = Script(tmp_path, no_locks)
    fourth.log("b")
    assert "not watching: " not in fourth.end()
    assert read_logged(tmp_path / "it") == ["a", "b"]
    assert [attempt.attempt for attempt in read_run(tmp_path / "it").attempts] == [1, 2, 3]


@pytest.mark.extended
@pytest.mark.slow
def test_without_flock_a_run_is_sent_while_it_is_written(
    tmp_path: Path, no_locks: dict[str, str]
) -> None:
    """Without flock one uploader sends a run while it is written, and deletes its lock file."""
    with IngestServer() as site:
        known = {"HALFSTEP_URL": site.url, "HALFSTEP_TOKEN": "token"}
        script = Script(tmp_path, no_locks | known)
        script.log("a")
        spool = tmp_path / "it" / "spool" / "1-0.spool"
        identity = read_run(tmp_path / "it").id
        until(lambda: identity in site.runs)
        script.log("b")
        until(lambda: site.runs[identity].attempts[1].spool.get(0) == spool.read_bytes())
        assert (tmp_path / "it" / "uploader.lock.owner").exists()
        script.end()
        until(lambda: site.runs[identity].attempts[1].outcome is not None)
        until(lambda: not (tmp_path / "it" / "uploader.lock.owner").exists())
        log = tmp_path / "it" / "uploader.log"
        assert not log.exists() or "failed" not in log.read_text()
        assert AttemptFiles(tmp_path / "it", 1).outcome.exists()


def owner_file(folder: Path, **changed: object) -> Path:
    """Write the lock of another process, with a test's changes."""
    path = folder / "it.lock.owner"
    lock = OwnerFile(path)
    assert lock.acquire()
    owner = json.loads(path.read_text())
    path.write_text(json.dumps(owner | {"token": "other"} | changed))
    lock.release()  # which leaves another's file alone
    assert path.exists()
    return path


def no_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FolderLock]:
    """Return locks of one file, on a file system without flock."""
    monkeypatch.setattr("halfstep.telemetry.folder_lock.fcntl.flock", no_flock)
    return lambda: FolderLock(tmp_path / "it.lock")


def test_a_waiting_process_gets_the_lock(lock: Callable[[], FolderLock]) -> None:
    """A process that waits for a lock gets it, and others can check it without acquiring it."""
    first, path = lock(), lock()._path
    assert (first.acquire(), lock().is_held()) == (True, True)
    held: list[bool] = []

    def wait() -> None:
        with folder_lock.held(path):
            held.append(first.is_held())

    thread = threading.Thread(target=wait)
    thread.start()
    first.release()
    thread.join()
    assert (held, lock().is_held()) == ([True], False)


def test_an_owner_on_another_machine_is_stale_without_a_heartbeat(
    tmp_path: Path, lock: Callable[[], FolderLock]
) -> None:
    """An owner on another machine is judged by its heartbeat, with the file system's clock."""
    path = owner_file(tmp_path, pid_space="another machine", pid=1)
    assert not lock().acquire()
    now = path.stat().st_mtime
    os.utime(path, (now, now - STALE_SECONDS / 2))
    assert not lock().acquire()
    os.utime(path, (now, now - STALE_SECONDS - 1))
    taken = lock()
    assert taken.acquire()
    assert not lock().acquire()
    taken.release()
    assert not path.exists()


def test_a_dead_owner_is_stale_at_once(tmp_path: Path, lock: Callable[[], FolderLock]) -> None:
    """A dead owner's lock is stale at once, a living owner's never."""
    path = owner_file(tmp_path)
    os.utime(path, (0, 0))
    assert not lock().acquire()
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": dead.pid}))
    assert lock().acquire()


def test_of_many_that_take_a_stale_lock_over_one_holds_it(
    tmp_path: Path, lock: Callable[[], FolderLock]
) -> None:
    """One of several processes takes over a stale lock, even if an earlier attempt died."""
    for number in range(20):
        path = owner_file(tmp_path, pid_space="another machine")
        os.utime(path, (0, 0))
        if number % 2:
            (tmp_path / "it.lock.owner.next").write_text("")
            os.utime(tmp_path / "it.lock.owner.next", (0, 0))
        locks = [lock() for _ in range(6)]
        begin = threading.Barrier(len(locks))
        held: list[FolderLock] = []

        def take(
            each: FolderLock, begin: threading.Barrier = begin, held: list[FolderLock] = held
        ) -> None:
            begin.wait()
            if each.acquire():
                held.append(each)

        threads = [threading.Thread(target=take, args=[each]) for each in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [holder] = held
        assert not lock().acquire()
        holder.release()
        assert not list(tmp_path.glob("*.owner*"))
