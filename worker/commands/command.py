"""Work of an attempt whose run is a command: its start, working folder and outcome."""

import errno
import os
import shutil
import sys
from pathlib import Path

from sqlalchemy.orm import Session

from db.access import secrets
from db.queue import queue
from db.runs.command_spec import read_command
from db.tables import Status
from halfstep import redaction, untrusted_files
from halfstep.cli import command_line
from halfstep.clock import clock
from halfstep.sandbox import defer
from halfstep.session import queued_run
from halfstep.telemetry.attempt_messages import (
    MOST_OF_RUN,
    CommandJob,
    WatchedOutcome,
    read_message,
    write_message,
)
from halfstep.telemetry.source_state import SourceState
from worker import gpus
from worker.attempts.attempt import LOST_LEASE, Attempt, CannotStart, Outcome, death, disk_full
from worker.attempts.child import Child
from worker.attempts.environment import Started
from worker.commands.checkout import CannotCheckOut, check_out
from worker.commands.command_runner import lease_request_path
from worker.sandbox import run_environment

#: Run by path, because the environment of a command may lack halfstep.
TORCHRUN = Path(queued_run.__file__).with_name("torchrun.py")
#: Share of a stopping worker's grace period between SIGTERM and SIGKILL; the rest is for recording.
GRACE_SHARE = 0.8


class Command:
    """A script, which may but need not use halfstep.watch."""

    def __init__(self, attempt: Attempt, session: Session) -> None:
        """Raises CannotStart."""
        self._attempt = attempt
        try:
            self._spec = read_command(attempt.run.command or {})
        except ValueError as error:
            raise CannotStart(f"its command cannot be read: {error}") from error
        key_file = attempt.settings.secrets_key
        try:
            self._secrets = secrets.read(session, key_file, self._spec.secrets)
        except secrets.Unreadable as error:
            raise CannotStart(str(error)) from error
        self._asked_at: float | None = None
        self._wanted = "run"

    def prepare(self) -> None:
        """Create its folder and write its job file, without secrets. Raises CannotStart."""
        attempt, spec = self._attempt, self._spec
        self._environment = self._build_environment()
        folder = self._folder()
        words = command_line.fill_placeholders(spec.line, attempt.run.config)
        argv = self._build_arguments(words)
        if attempt.files.attempt > 1:
            text = "The command starts again; resuming is up to its script."
            attempt.append_log(f"Attempt {attempt.files.attempt}. {text}")
        attempt.append_log(f"$ {spec.line}" if words == argv else f"$ {' '.join(words)}")
        self._places = (str(folder), spec.venv)
        job = CommandJob(
            argv=argv,
            words=words,
            folder=str(folder),
            started_at=attempt.started_at,
            project=attempt.run.project,
            sources=spec.sources,
        )
        write_message(attempt.files.job, job)
        self._to_start = Started(words, str(folder), self._read_state, self._hidden)

    def describe_start(self) -> Started:
        """Return the process to start; call it after `prepare`."""
        return self._to_start

    def is_described(self) -> bool:
        """Return whether its process has described source and git state."""
        files = self._attempt.files
        return untrusted_files.is_file(files.folder, files.description.name)

    def _read_state(self) -> SourceState:
        try:
            return read_message(self._attempt.files.description, SourceState, MOST_OF_RUN)
        except (OSError, ValueError):  # it may contain anything
            return SourceState()

    def start(self) -> Child:
        """Start the command by the command runner. Call it from the main thread."""
        files = self._attempt.files
        argv = [sys.executable, "-I", "-m", "worker.commands.command_runner"]
        argv += [str(files.folder), str(files.attempt), str(files.control_folder)]
        try:
            isolation = self._attempt.isolation(needed=self._places).variable()
            environment = run_environment.of_commands() | defer(self._environment) | isolation
            return Child(argv, environment, self._hidden, self._attempt.log)
        except OSError as error:  # e.g. its variables exceed Linux's limit
            raise CannotStart(f"it cannot be started: {error}", failure_kind="settings") from error

    def acknowledge(
        self, requested: queue.DesiredState, child: Child, *, is_preempted: bool
    ) -> None:
        """Request it to end by SIGTERM; kill it after its grace period."""
        if self._asked_at is None and (requested.desired_state == "cancel" or is_preempted):
            self._asked_at, self._wanted = clock(), requested.desired_state
            child.terminate()
        grace = GRACE_SHARE * self._attempt.settings.stop_grace_seconds
        if self._asked_at is not None and clock() > self._asked_at + grace:
            child.kill()

    def outcome(
        self, exit_code: int, child: Child, *, is_preempted: bool, has_lost_lease: bool
    ) -> Outcome:
        """Return the outcome by its exit code, or by the request that ended it."""
        if self._asked_at is not None and self._wanted == "cancel":
            return Outcome(Status.CANCELLED)
        if self._asked_at is not None or is_preempted:
            return Outcome(Status.QUEUED, "its worker was stopped", failure_kind="infrastructure")
        if has_lost_lease or self._has_asked_for_lease():
            return Outcome(None, LOST_LEASE)
        if exit_code < 0:
            return Outcome(None, death(exit_code, "the command"))
        if exit_code == 0:
            return Outcome(Status.FINISHED)
        # Two threads read the two streams: the error is on stderr, whichever line was read last.
        lines = [*child.last_lines["stdout"], *child.last_lines["stderr"]]
        error = self._traceback() or "\n".join(lines)
        error = str(redaction.without(error, *self._hidden)).strip()
        if os.strerror(errno.ENOSPC) in error:
            return disk_full(self._attempt.control_folder, error)
        last = f"; last line: {error.splitlines()[-1][:500]}" if error else " and printed nothing"
        reason = f"the command exited with code {exit_code}{last}"
        return Outcome(Status.FAILED, reason, error or reason, "code")

    def _has_asked_for_lease(self) -> bool:
        files = self._attempt.files
        return untrusted_files.is_file(files.folder, lease_request_path(files).name)

    def _traceback(self) -> str:
        """Return the traceback in the outcome that the script's own watch wrote, if it failed."""
        path = self._attempt.files.outcome
        try:
            outcome = read_message(path, WatchedOutcome, MOST_OF_RUN)
            return outcome.error or "" if outcome.status == "failed" else ""
        except (OSError, ValueError):  # it may contain anything
            return ""

    @property
    def _hidden(self) -> list[str]:
        """Texts hidden in logs: secrets, and single lines of those with several."""
        values = self._secrets.values()
        lines = [line for value in values for line in value.splitlines()]
        texts = {*values, *(line for line in lines if len(line) >= redaction.SHORTEST)}
        return sorted(texts, key=len, reverse=True)  # longest first: one may be a prefix of another

    def _build_environment(self) -> dict[str, str]:
        """Return the complete environment. Raises CannotStart."""
        attempt, venv = self._attempt, self._spec.venv
        base = run_environment.of_commands() | attempt.temporary()
        programs = Path(venv, "bin") if venv else Path(sys.executable).parent
        if not (programs / "python").exists():
            text = f"{venv} is no virtual environment on this worker: it has no bin/python"
            raise CannotStart(text, failure_kind="settings")
        base["PATH"] = f"{programs}{os.pathsep}{base.get('PATH', os.defpath)}"
        if venv:
            base["VIRTUAL_ENV"] = venv
        ours = {
            **gpus.environment(attempt.devices if attempt.is_cuda else []),
            queued_run.RUN: str(attempt.run.id),
            queued_run.SECRETS: ",".join(self._secrets),
            queued_run.ATTEMPT: str(attempt.files.attempt),
            queued_run.FOLDER: str(attempt.files.folder),
            queued_run.CONTROL_FOLDER: str(attempt.files.control_folder),
        }
        # Unbuffered, so that output is logged at once, and not lost if the script is killed.
        stated = {"PYTHONUNBUFFERED": "1", **self._spec.variables, **self._secrets}
        return {**base, **stated, **ours}

    def _folder(self) -> Path:
        """Return its working folder, created if necessary. Raises CannotStart."""
        spec, own = self._spec, self._attempt.files.work
        root = self._attempt.files.folder
        folder = Path(spec.folder)
        if spec.git:
            self._check_out(own)
            folder = own / spec.folder
        elif not spec.folder:
            untrusted_files.make_folder(root, own.name)
            folder = own
        is_own = folder.is_relative_to(root)
        if not (
            untrusted_files.is_folder(root, folder.relative_to(root).as_posix())
            if is_own
            else folder.is_dir()
        ):
            place = f"{spec.git} at {spec.commit}" if spec.git else "this worker"
            raise CannotStart(
                f"there is no folder {spec.folder} on {place}", failure_kind="settings"
            )
        return folder

    def _check_out(self, folder: Path) -> None:
        spec, attempt = self._spec, self._attempt
        try:
            commit = check_out(
                spec.git,
                spec.commit,
                folder,
                self._environment | self._git_settings(),
                attempt.check_not_stopped,
                isolation=attempt.isolation(),
                patch=spec.patch,
            )
        except CannotCheckOut as error:
            raise CannotStart(str(error), failure_kind="settings") from error
        patched = ", with a patch" if spec.patch else ""
        attempt.append_log(f"In a checkout of {spec.git} at {commit}{patched}")

    def _git_settings(self) -> dict[str, str]:
        """Return variables with which a user of the run's own reads repositories of others."""
        if self._attempt.user is None:
            return {}
        path = self._attempt.control_folder / "gitconfig"
        path.write_text("[safe]\n\tdirectory = *\n")
        return {"GIT_CONFIG_GLOBAL": str(path)}

    def _build_arguments(self, words: list[str]) -> list[str]:
        """Return the arguments to execute: the program's path, with torchrun on several devices."""
        program, devices = words[0], len(self._attempt.devices)
        path = program if "/" in program else shutil.which(program, path=self._environment["PATH"])
        if path is None:
            text = f"there is no program {program} in the PATH of this worker"
            raise CannotStart(text, failure_kind="settings")
        if devices > 1:
            return [path, str(TORCHRUN), str(devices), *words[1:]]
        return [path, *words[1:]]
