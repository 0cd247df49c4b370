"""The process between supervisor and command, tested through files and signals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles
from tests.site import is_running, until
from worker.commands.command_runner import NOT_STARTED, lease_request_path

NEVER = 1e12
WAITS = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"


class Kept:
    """A command and its runner."""

    def __init__(self, folder: Path) -> None:
        self.files = AttemptFiles(folder, 1)
        self.begun = folder / "begun"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *argv: str, supervisor: int | None = None) -> subprocess.Popen[bytes]:
        job = {"argv": list(argv), "folder": str(self.files.folder), "started_at": 0.0}
        self.files.job.write_text(json.dumps(job))
        self.lease(NEVER, NEVER)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-m",
                "worker.commands.command_runner",
                str(self.files.folder),
                "1",
                str(self.files.folder),
            ],
            env={**os.environ, "HALFSTEP_PARENT_PID": str(supervisor or os.getpid())},
            stderr=subprocess.PIPE,
        )
        return self.process

    def waits(self, code: str = WAITS, **named: int) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Start a waiting command; return its runner, and its child processes."""
        command_runner = self.start(sys.executable, "-c", code, str(self.begun), **named)
        until(self.begun.exists)
        family = [each.pid for each in psutil.Process(command_runner.pid).children(recursive=True)]
        return command_runner, family

    def lease(self, ask: float, kill: float) -> None:
        temporary = self.files.folder / "lease"
        temporary.write_text(json.dumps({"ask": ask, "kill": kill}))
        temporary.replace(self.files.lease)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """A command runner to start, which is ended after the test."""
    kept = Kept(tmp_path)
    yield kept
    assert kept.process is not None
    assert kept.process.stderr is not None
    kept.process.stderr.close()
    assert kept.process.poll() is not None


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 40)", -40),
        ("import signal; exit(signal.getsignal(2) is signal.default_int_handler)", 1),
    ],
)
def test_it_ends_as_its_command_does(kept: Kept, code: str, end: int) -> None:
    """The runner ends with its command's exit code or signal, also for Ctrl-C."""
    assert kept.start(sys.executable, "-c", code).wait(60) == end


@pytest.mark.parametrize("name", ["t", "d" * 120])
def test_a_command_makes_sockets_however_deep_its_folder_lies(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """multiprocessing's sockets work in a deep folder, by a short TMPDIR through /proc."""
    code = (
        "import multiprocessing, tempfile\n"
        "numbers = multiprocessing.Manager().dict(it=7)\n"
        "tempfile.mkstemp()\n"
        "exit(numbers['it'])"
    )
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    command_runner = kept.start(sys.executable, "-c", code)
    assert command_runner.wait(60) == 7
    assert command_runner.stderr is not None
    assert command_runner.stderr.read() == b""
    assert len([*folder.glob("tmp*")]) == 1


def test_a_command_that_cannot_be_started_is_reported(kept: Kept) -> None:
    """A command that cannot be started is reported with program and reason."""
    command_runner = kept.start("/nowhere/at/all")
    assert command_runner.wait(60) == NOT_STARTED
    assert command_runner.stderr is not None
    assert b"/nowhere/at/all cannot be started" in command_runner.stderr.read()


def test_sigterm_is_passed_on(kept: Kept) -> None:
    """SIGTERM to the runner is passed to the command."""
    command_runner, _family = kept.waits()
    command_runner.terminate()
    assert command_runner.wait(60) == -signal.SIGTERM
    assert not lease_request_path(kept.files).exists()


def test_at_half_a_lease_it_is_signalled_and_later_killed(kept: Kept) -> None:
    """Without a lease renewal the command is signalled at half of the lease, and later killed."""
    ignores = f"import signal; signal.signal(15, signal.SIG_IGN); {WAITS}"
    command_runner, family = kept.waits(ignores)
    kept.lease(clock() - 1, NEVER)
    until(lease_request_path(kept.files).exists)
    assert command_runner.poll() is None
    kept.lease(clock() - 2, clock() - 1)
    assert command_runner.wait(60) == -signal.SIGKILL
    assert not any(psutil.pid_exists(pid) for pid in family)


LEAVES = (
    "import os, subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True)\n"
    "open(sys.argv[1], 'w')\n"
    "while not os.path.exists(sys.argv[1] + '-over'): time.sleep(0.01)\n"
)


@pytest.mark.slow
def test_processes_of_a_command_end_with_it(kept: Kept) -> None:
    """Processes that left the command's session, such as ranks, end with it."""
    command_runner, family = kept.waits(LEAVES)
    assert len(family) == 2
    kept.begun.with_name("begun-over").touch()
    assert command_runner.wait(60) == 0
    assert not any(psutil.pid_exists(pid) for pid in family)


@pytest.mark.slow
def test_a_command_does_not_outlive_its_supervisor_or_its_keeper(kept: Kept) -> None:
    """A command is killed if its supervisor, or its runner, was killed."""
    command_runner = kept.start(sys.executable, "-c", WAITS, str(kept.begun), supervisor=1)
    assert command_runner.wait(60) == -signal.SIGKILL
    kept.begun.unlink(missing_ok=True)
    assert command_runner.stderr is not None
    command_runner.stderr.close()
    command_runner, [pid] = kept.waits()
    command = psutil.Process(pid)
    command_runner.kill()
    command_runner.wait(60)
    until(lambda: not is_running(command))
