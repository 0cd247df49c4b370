"""One attempt of one run, from claim to end: starts the training, records what it tells, obeys.

    python -m worker.supervisor RUN ATTEMPT        (the worker's engine calls this)

The training knows no database: it appends to its spool and reads its control file. This process
has the database but no torch. While the database is away the spool simply grows.
"""

import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from db import checkpoints, queue, workers
from db.database import Database, open_database
from db.errors import Fenced
from db.settings import Settings
from db.storage import get_file, open_store
from db.tables import Checkpoint, Status
from halfstep.attempt_files import AttemptFiles
from halfstep.clock import clock
from worker import gpus
from worker.child import Child
from worker.recorder import CannotRecord, Recorder, may_pass, wait_for
from worker.samples import SystemMonitor

#: How often the spool is looked at: a step is on the page within half a second.
TICK_SECONDS = 0.05
RENEWAL_SECONDS = 0.4  # how often the lease is renewed and wishes are read
OUTAGE_SECONDS = 2.0  # how long to wait, at most, before the database is tried again
#: Shares of the lease after which a training whose lease could not be renewed is asked to leave a
#: checkpoint and end, and is killed: well before somebody else may start it.
ASK_SHARE, KILL_SHARE = 0.5, 0.7

#: What a training said of its end, and what becomes of the run.
OUTCOMES = {
    "finished": Status.FINISHED,
    "failed": Status.FAILED,
    "cancelled": Status.CANCELLED,
    "paused": Status.PAUSED,
    "preempted": Status.QUEUED,
}


class Unwanted(Exception):
    """The attempt is not to begin any more, and waits for what is away."""


def retention(config: dict[str, Any]) -> dict[str, Any]:
    """Return which checkpoints to keep, as the training reads it.

    All its numbers are whole; an earlier version queued runs with 2.0 for one.
    """
    policy = config.get("checkpoints", {})
    return {
        name: int(value) if isinstance(value, float) else value for name, value in policy.items()
    }


class CannotStart(Exception):
    """The attempt cannot begin, and another one could not either; the message says why."""


class Supervisor:
    """The state of one attempt. `run` is its whole life."""

    def __init__(self, settings: Settings, database: Database, run_id: int, attempt: int) -> None:
        self.settings = settings
        self.database = database
        self.run_id = run_id
        self.attempt = attempt
        self.folder = settings.run_folder(run_id)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = AttemptFiles(self.folder, attempt)
        self.store = open_store(settings)
        self.recorder = Recorder(settings, database, self.store, run_id, attempt)
        self.lease = {"ask": 0.0, "kill": 0.0}
        self.control: dict[str, Any] = {"stop": None, "requests": []}  # see halfstep.spool
        self.has_lost_lease = False  # by the time that the training had ended
        self.preempted = threading.Event()
        self.ended = threading.Event()

    def run(self) -> None:
        """Start the training, record it until it ends, and close the attempt."""
        try:
            self._begin()
            child = Child(self.folder, self.attempt, len(self.devices), self._environment())
            threading.Thread(target=self._guard_lease, args=(child,), daemon=True).start()
            try:
                self._follow(child)
            finally:
                child.kill()
                self.ended.set()
        except CannotStart as error:
            with self.database.writing() as session:
                self._fail(session, str(error), str(error))
        except CannotRecord as error:
            with self.database.writing() as session:
                self._fail(session, str(error), traceback.format_exc(), fault="code")
        except Unwanted as error:
            with self.database.writing() as session:
                queue.end(session, self.run_id, self.attempt, Status.QUEUED, reason=str(error))
        except Fenced:
            _say("fenced: another attempt may be running")

    def preempt(self, *_signal: Any) -> None:
        """Ask the training to leave a checkpoint and let the run go back to the queue."""
        self.preempted.set()

    def _begin(self) -> None:
        """Do all that comes before the training; wait for a database or a store that is away.

        Raises CannotStart, CannotRecord, Fenced, and Unwanted if it is stopped while it waits.
        """
        wanted = "run"
        while True:
            try:
                wanted = self._renew().wanted
                self._recover()
                self._prepare()
                self._renew()
                return
            except Exception as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise CannotStart(self._disk_full()) from error
                if not may_pass(error):
                    raise
                _say(f"waiting: {error}")
                if self.preempted.is_set() or wanted != "run":
                    raise Unwanted(f"stopped before it could start: {error}") from error
            time.sleep(OUTAGE_SECONDS)

    def _recover(self) -> None:
        """Record what an earlier attempt spooled and nobody recorded."""
        while not self.recorder.flush(meanwhile=self._keep_up):
            self._renew()
        if self.recorder.fault:
            raise CannotRecord(self.recorder.fault)

    def _prepare(self) -> None:
        """Write the job that the training reads. Raises Fenced."""
        with self.database.writing() as session:
            run = queue.held(session, self.run_id, self.attempt)
            started_at = clock() - queue.seconds_since_start(session, run)
            seconds_before = queue.seconds_in_training(session, self.run_id)
            node = queue.node(session, self.run_id, self.attempt)
            self.devices = node.devices
            self.is_cuda = workers.get(session, node.worker_id).devices[0]["kind"] == "cuda"
            states = checkpoints.to_resume(session, run)
        resume = next(filter(None, map(self._fetch, states)), None)
        if run.parent_id is not None and resume is None:
            text = f"the checkpoint of run {run.parent_id} at step {run.parent_step} that it was to"
            raise CannotStart(f"{text} start from is missing or damaged")
        job = {
            "run": self.run_id,
            "attempt": self.attempt,
            "recipe": run.recipe,
            "config": run.config,
            "started_at": started_at,
            "seconds_before": seconds_before,
            "resume": resume,
            "device": "cuda" if self.is_cuda else "cpu",
        }
        self._write(self.files.job, job)
        self._write(self.files.control, self.control)
        monitor = SystemMonitor(self.devices, cuda=self.is_cuda)
        self.recorder.begin(monitor, started_at, retention(run.config))

    def _fetch(self, state: Checkpoint) -> str | None:
        """Return where a whole checkpoint lies on this machine, or say what it lacks."""
        path = self.settings.data / state.key
        try:
            fetch = partial(get_file, self.store, state.key, path, sha256=state.sha256)
            wait_for(fetch, self._keep_up)
        except (FileNotFoundError, ValueError) as error:
            self.recorder.remark(f"{error}; trying the checkpoint before it")
            return None
        return str(path)

    def _environment(self) -> dict[str, str]:
        # torchrun would set the same number of threads, and say so in the run's log.
        return {**gpus.environment(self.devices if self.is_cuda else []), "OMP_NUM_THREADS": "1"}

    def _follow(self, child: Child) -> None:
        """Record until the training has ended and all that it said is in the database."""
        renewal_due = 0.0
        pause = TICK_SECONDS
        while True:
            code = child.exit_code()
            if code is not None:
                child.finish_listening()
                self.has_lost_lease = self.has_lost_lease or clock() > self.lease["kill"]
            try:
                if clock() >= renewal_due:
                    self._obey(self._renew(), child)
                    renewal_due = clock() + RENEWAL_SECONDS
                is_drained = self.recorder.flush(
                    child.take_lines, meanwhile=partial(self._keep_up, child)
                )
                if code is not None and is_drained:
                    self._end(code)
                    return
                if self.recorder.fault:
                    child.kill()  # what it told before that is recorded to the end
                pause = TICK_SECONDS
            except Exception as error:
                if not may_pass(error):
                    raise
                # What is pending waits, the spool keeps what comes, and the watchdog counts.
                _say(f"waiting: {error}")
                pause = min(pause * 2, OUTAGE_SECONDS)
            time.sleep(pause)

    def _renew(self) -> queue.Wishes:
        """Renew the lease, for the training's guard too; return people's wishes. Raises Fenced."""
        before = clock()  # the lease counts from before it was asked for, to be safe
        lease = self.settings.lease_seconds
        with self.database.writing() as session:
            wishes = queue.renew(session, self.run_id, self.attempt, lease)
        self.lease = {"ask": before + ASK_SHARE * lease, "kill": before + KILL_SHARE * lease}
        self._write(self.files.lease, self.lease)
        return wishes

    def _keep_up(self, child: Child | None = None) -> None:
        """Renew the lease, if the database answers, and pass on what people want. Raises Fenced."""
        try:
            wishes = self._renew()
            if child:
                self._obey(wishes, child)
        except Exception as error:
            if not may_pass(error):
                raise

    def _obey(self, wishes: queue.Wishes, child: Child) -> None:
        """Pass on what people want."""
        if wishes.wanted == "kill":
            child.kill()
            return
        stop = {"run": None, "pause": "pause", "cancel": "cancel"}[wishes.wanted]
        if self.preempted.is_set():
            stop = stop or "preempt"
        requests = [
            {"id": each.id, "kind": each.kind, "value": each.value or 0.0}
            for each in wishes.requests
        ]
        self._command({"stop": stop, "requests": requests})

    def _command(self, control: dict[str, Any]) -> None:
        if control != self.control:
            self.control = control
            self._write(self.files.control, control)

    def _guard_lease(self, child: Child) -> None:
        """Kill a training whose lease cannot be renewed; never waits for the database.

        The training's own guard has asked it for a checkpoint by then, and kills it as well, should
        this process be stopped.
        """
        while not self.ended.wait(min(0.5, self.settings.lease_seconds / 20)):
            if clock() > self.lease["kill"]:
                child.kill()

    def _end(self, exit_code: int) -> None:
        """Close the attempt by what the training left behind as its outcome, or by how it died."""
        said = self.files.outcome
        outcome: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}
        with self.database.writing() as session:
            if self.recorder.fault:
                self._fail(session, self.recorder.fault, self.recorder.fault, fault="code")
            # A gang of which one was killed leaves an outcome too: the others' complaint about it.
            elif outcome and not (exit_code < 0 and outcome["status"] == "failed"):
                self._end_as_said(session, outcome)
            else:
                self._end_killed(session, exit_code)
        self.recorder.clear()

    def _end_as_said(self, session: Session, outcome: dict[str, Any]) -> None:
        status, reason, fault = OUTCOMES[outcome["status"]], None, None
        error = outcome["error"]
        if status == Status.FAILED and os.strerror(errno.ENOSPC) in error:
            self._fail(session, self._disk_full(), error)
            return
        if status == Status.FAILED:
            reason, fault = error.splitlines()[-1], "code"
        elif status == Status.QUEUED:
            reason = "its worker was stopped" if self.preempted.is_set() else LOST_LEASE
            fault = "infrastructure"
        queue.end(
            session, self.run_id, self.attempt, status, reason=reason, error=error, fault=fault
        )

    def _end_killed(self, session: Session, exit_code: int) -> None:
        reason = LOST_LEASE if self.has_lost_lease else _death(exit_code)
        attempt = (self.run_id, self.attempt)
        if exit_code == errno.ENOSPC:  # even its outcome could not be written
            self._fail(session, self._disk_full(), self._disk_full())
        elif self.preempted.is_set():
            fault = "infrastructure"
            queue.end(session, *attempt, Status.QUEUED, reason=reason, fault=fault)
        else:
            queue.end_killed(
                session,
                *attempt,
                reason=reason,
                max_attempts=self.settings.max_attempts,
                max_stalled_attempts=self.settings.max_stalled_attempts,
            )

    def _fail(
        self, session: Session, reason: str, error: str, *, fault: str = "infrastructure"
    ) -> None:
        """Fail the run for what its training did not say itself. Raises Fenced."""
        queue.end(
            session,
            self.run_id,
            self.attempt,
            Status.FAILED,
            reason=reason,
            error=error,
            fault=fault,
        )

    def _disk_full(self) -> str:
        return f"no space left on the disk that holds {self.folder}"

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """Write a file so that a reader sees the old one or the new one, never a part."""
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)


def _say(text: str) -> None:
    """Add a line to our own log, unless its disk is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


LOST_LEASE = "its lease could not be renewed"


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"the training process was killed by {signal.Signals(-exit_code).name}"
    return f"the training process ended with exit code {exit_code} and left no outcome"


def main() -> None:
    """Run the attempt that the command line names."""
    run_id, attempt = map(int, sys.argv[1:])
    settings = Settings.read()
    database = open_database(settings)
    supervisor = Supervisor(settings, database, run_id, attempt)
    signal.signal(signal.SIGTERM, supervisor.preempt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.run()


if __name__ == "__main__":
    main()
