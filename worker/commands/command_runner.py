"""Keeps a command: starts it, passes SIGTERM on to it, and ends all that it has left behind.

    python -I -m worker.commands.command_runner <run folder> <attempt>

A recipe's training ties itself to its supervisor's life and watches its lease. A script knows of
neither, so this process, which is its parent, does it in its place: the command ends with its
supervisor, and when its lease is as good as lost. How the command ended is how this process ends.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from halfstep.clock import clock
from halfstep.process import end_with_parent
from halfstep.sandbox import Wall, apply_deferred
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.socket_folder import short_path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOK_SECONDS = 0.2
NOT_STARTED = 127  # as a shell has it


class CommandRunner:
    """The command of one attempt."""

    def __init__(self, files: AttemptFiles, supervisor_pid: int) -> None:
        self._files, self._supervisor_pid = files, supervisor_pid
        self._command: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        # What the command leaves behind, its ranks and loaders, becomes ours to end.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def ask(self, *_signal: Any) -> None:
        """Ask the command to end, once."""
        if self._command and not self._is_asked:
            self._command.send_signal(signal.SIGTERM)
        self._is_asked = True

    def run(self) -> int:
        """Start the command and return its exit code, negative for a signal."""
        job = json.loads(self._files.job.read_text())
        try:
            command = subprocess.Popen(
                job["argv"],
                cwd=job["folder"],
                env={**os.environ, **_temporary_folder()},
                start_new_session=True,
                preexec_fn=_tie_to_parent,
            )
        except OSError as error:
            place = f" in {job['folder']}"
            sys.stderr.write(f"halfstep: {job['argv'][0]} cannot be started{place}: {error}\n")
            return NOT_STARTED
        self._command = command
        if self._is_asked:  # before there was anybody to ask
            command.send_signal(signal.SIGTERM)
        while command.poll() is None:
            self._heed_lease()
            with suppress(subprocess.TimeoutExpired):
                command.wait(LOOK_SECONDS)
        _end_what_is_left()
        return command.returncode

    def _heed_lease(self) -> None:
        """End the command with its supervisor, or at 0.7 of a lease that is not renewed."""
        lease = json.loads(self._files.lease.read_text())
        if os.getppid() != self._supervisor_pid or clock() > lease["kill"]:
            _kill_descendants()
        elif clock() > lease["ask"]:
            asked_for_lease(self._files).touch()
            self.ask()


def asked_for_lease(files: AttemptFiles) -> Path:
    """Return the file that is there if the command was asked to end for its lease."""
    return files.folder / f"asked-{files.attempt}"


def _end_what_is_left() -> None:
    """Kill until there is nothing: what is killed may just have started another."""
    while _kill_descendants():
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _kill_descendants() -> bool:
    """Return whether there was one; what is another user's by now is not ours to end."""
    has_killed = False
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            child.kill()
            has_killed = True
    return has_killed


def _temporary_folder() -> dict[str, str]:
    """Return TMPDIR by a path that is short enough for sockets, where this process has one."""
    folder = os.environ.get("TMPDIR", "")
    return {"TMPDIR": short_path(folder)} if Path(folder or "-").is_dir() else {}


def _tie_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it would go on being ignored
    end_with_parent()


def _end_as(code: int) -> NoReturn:
    """End as the command did, without a core of our own."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main() -> None:
    """Keep the command that the command line names."""
    files = AttemptFiles(Path(sys.argv[1]), int(sys.argv[2]))
    supervisor_pid = int(os.environ.pop("HALFSTEP_PARENT_PID"))
    if wall := Wall.taken(os.environ):
        wall.build()
    apply_deferred(os.environ)
    _end_as(CommandRunner(files, supervisor_pid).run())


if __name__ == "__main__":
    main()
