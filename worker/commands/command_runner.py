"""Command runner: starts a command, forwards SIGTERM, and kills everything it leaves behind.

    python -I -m worker.commands.command_runner <scratch folder> <attempt> <control folder>

A recipe's training is tied to its supervisor and watches its lease. A script does neither, so this
process, its parent, does it: the command ends with its supervisor, or when its lease expires. This
process ends like the command did.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec.structs import replace

from halfstep.cli.command_sources import list_changed
from halfstep.clock import clock
from halfstep.isolation import PARENT, Isolation
from halfstep.process import end_as, end_with_parent, script_problem
from halfstep.sandbox import apply_deferred
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import CommandJob, Lease, read_message, write_message
from halfstep.telemetry.socket_folder import short_path
from halfstep.telemetry.source_state import SourceState, read_state

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_SECONDS = 0.2
OUTSIDE = 0  # process id of a parent outside of the namespace, with which this process ends
NOT_STARTED = 127  # as in a shell


class CommandRunner:
    """The command of one attempt."""

    def __init__(self, files: AttemptFiles, supervisor_pid: int) -> None:
        self._files, self._supervisor_pid = files, supervisor_pid
        self._command: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        # Orphaned descendants of the command, e.g. ranks and loaders, become children of this
        # process.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def ask(self, *_signal: object) -> None:
        """Send SIGTERM to the command, once."""
        if self._command and not self._is_asked:
            self._command.send_signal(signal.SIGTERM)
        self._is_asked = True

    def run(self) -> int:
        """Start the command and return its exit code, negative for a signal."""
        job = read_message(self._files.job, CommandJob)
        state = _describe(job)
        with suppress(OSError):  # such as a full disk
            write_message(self._files.description, state)
        if state.changed:
            names = ", ".join(state.changed)
            text = f"files differ from when the command was queued, and run as they are: {names}"
            sys.stderr.write(f"halfstep: {text}\n")
            sys.stderr.flush()
        if problem := script_problem(job.argv[0], Path(job.folder)):
            sys.stderr.write(f"halfstep: {problem}\n")
            return NOT_STARTED
        try:
            command = subprocess.Popen(
                job.argv,
                cwd=job.folder,
                env={**os.environ, **_temporary_folder()},
                start_new_session=True,
                preexec_fn=_tie_to_parent,
            )
        except OSError as error:
            place = f" in {job.folder}"
            sys.stderr.write(f"halfstep: {job.argv[0]} cannot be started{place}: {error}\n")
            return NOT_STARTED
        self._command = command
        if self._is_asked:  # requested before the command was started
            command.send_signal(signal.SIGTERM)
        while command.poll() is None:
            self._check_lease()
            with suppress(subprocess.TimeoutExpired):
                command.wait(POLL_SECONDS)
        _end_what_is_left()
        return command.returncode

    def _check_lease(self) -> None:
        """End the command with its supervisor, or at 0.7 of a lease that is not renewed."""
        lease = read_message(self._files.lease, Lease)
        if os.getppid() not in (self._supervisor_pid, OUTSIDE) or clock() > lease.kill:
            _kill_descendants()
        elif clock() > lease.ask:
            lease_request_path(self._files).touch()
            self.ask()


def lease_request_path(files: AttemptFiles) -> Path:
    """Return the path of a file that exists if the command was asked to end for its lease."""
    return files.folder / f"asked-{files.attempt}"


def _end_what_is_left() -> None:
    """Kill descendants until none is left: a killed one may just have started another."""
    while _kill_descendants():
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _kill_descendants() -> bool:
    """Kill all descendants; return whether there was one. Those of other users are skipped."""
    has_killed = False
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            child.kill()
            has_killed = True
    return has_killed


def _temporary_folder() -> dict[str, str]:
    """Return a TMPDIR path short enough for sockets, if this process has a TMPDIR."""
    folder = os.environ.get("TMPDIR", "")
    return {"TMPDIR": short_path(folder)} if Path(folder or "-").is_dir() else {}


def _tie_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # otherwise it would stay ignored
    end_with_parent()


def _describe(job: CommandJob) -> SourceState:
    """Return source and git state of the command."""
    folder = Path(job.folder)
    scripts = (folder / word for word in job.words if word.endswith(".py"))
    state = read_state(next(filter(Path.is_file, scripts), None), folder)
    return replace(state, changed=list_changed(job.sources, folder))


def main() -> None:
    """Run the command of the attempt on the command line."""
    files = AttemptFiles(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    Isolation.from_environment(os.environ).apply()
    supervisor_pid = int(os.environ.pop(PARENT))
    apply_deferred(os.environ)
    end_as(CommandRunner(files, supervisor_pid).run())


if __name__ == "__main__":
    main()
