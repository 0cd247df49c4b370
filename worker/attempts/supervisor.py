"""Supervisor of one attempt: starts the training, records it, applies requests.

    python -m worker.attempts.supervisor RUN ATTEMPT [NODE]        (the worker's engine calls this,
                                                                   or forks it: run_forked)

The training does not use the database: it appends to its spool and reads its control file. This
process uses the database but not torch. During a database outage the spool grows. A multi-node run
has one supervisor per node: the first records and closes the attempt.
"""

import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

import setproctitle  # noqa: F401 - by which the fork server names processes

from db.database import Database, open_database
from db.errors import StaleAttempt
from db.files.object_store import open_store
from db.queue import queue, workers
from db.runs import runs
from db.settings import Settings
from db.tables import COMMAND, Status, Worker
from halfstep.cli import logs
from halfstep.clock import clock
from halfstep.fork_server import Begun
from halfstep.process import close_to_others
from halfstep.sidecar.system import SystemMonitor
from halfstep.telemetry.attempt_files import AttemptFiles
from worker import disk_space
from worker.attempts.attempt import Attempt, CannotStart, Outcome, disk_full, end_attempt
from worker.attempts.attempt_lease import AttemptLease
from worker.attempts.child import Child
from worker.attempts.environment import AttemptEnvironment, try_describe
from worker.attempts.node_group import NodeGroup, NodeLog
from worker.attempts.recorder import CannotRecord, Recorder, may_pass
from worker.attempts.run_isolation import RunIsolation
from worker.attempts.scratch_folders import make_folders
from worker.attempts.training import Training
from worker.commands.command import Command

logger = logging.getLogger(__name__)

#: How often the spool is polled: a step is on the page within half a second.
TICK_SECONDS = 0.05
FIRST_TICK_SECONDS = 0.01  # until the first step: users wait for it
RENEWAL_SECONDS = 0.4  # interval of lease renewals and of reading user requests
OUTAGE_SECONDS = 2.0  # longest wait before retrying the database
#: Folder of the built-in recipes, which no run writes.
BUILT_IN = Path(__file__).parents[2] / "trainer" / "recipes"


class StopRequested(Exception):
    """Attempt that should no longer begin, cancelled while waiting to start."""


class DiskFull(Exception):
    """The disk is full before the training could start."""


class Supervisor:
    """State of one attempt; `run` executes it from start to end."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        run_id: int,
        attempt: int,
        node: int = 0,
        *,
        warm: socket.socket | None = None,
    ) -> None:
        """warm: client's socket of the process that forks the training."""
        self.settings = settings
        self.database = database
        self.run_id = run_id
        self.attempt = attempt
        self.node = node
        self.warm = warm
        self.folder, scratch = make_folders(settings, run_id, node)
        self.files = AttemptFiles(scratch, attempt, self.folder)
        self.store = open_store(settings)
        self.recorder = (
            NodeLog(settings, database, run_id, attempt, node)
            if node
            else Recorder(settings, database, self.store, run_id, attempt)
        )
        with database.reading() as session:
            is_alone = runs.get(session, run_id).nodes == 1
        self.node_group = None if is_alone else NodeGroup(settings, self.files, run_id, node)
        self.isolation = RunIsolation(
            settings, self.files, self.folder, f"run-{run_id}-{attempt}-{node}"
        )
        self.lease = AttemptLease(settings, database, self.files, run_id, node)
        self.has_lost_lease = False  # when the training ended
        self.is_recorded = False  # everything in the spool
        self.environment: AttemptEnvironment | None = None
        self.has_warned = False  # of a disk that is nearly full
        self.preempted = threading.Event()
        self.ended = threading.Event()

    def run(self) -> None:
        """Run this node's part of the attempt, unless another attempt has begun."""
        try:
            self._close(self._outcome())
        except StaleAttempt:
            logger.warning("fenced: another attempt may be running")
        finally:
            if isinstance(self.recorder, Recorder):
                self.recorder.stop()

    def _outcome(self) -> Outcome:
        """Start the training, record it to its end, and return its outcome.

        Raises StaleAttempt.
        """
        try:
            self._begin()
            child = self.work.start()
            threading.Thread(target=self.lease.guard, args=(child, self.ended), daemon=True).start()
            try:
                return self._follow(child)
            finally:
                child.kill()
                self.isolation.release()
                self.ended.set()
        except DiskFull:
            return disk_full(self.folder)
        except CannotStart as error:
            return Outcome(Status.FAILED, str(error), str(error), error.failure_kind)
        except CannotRecord as error:
            return Outcome(Status.FAILED, str(error), traceback.format_exc(), "code")
        except StopRequested as error:
            return Outcome(Status.QUEUED, str(error))

    def preempt(self, *_signal: object) -> None:
        """Request that the training save a checkpoint and the run be requeued."""
        self.preempted.set()

    def _begin(self) -> None:
        """Prepare the training, waiting out a database or store outage.

        Raises CannotStart, DiskFull, CannotRecord, StaleAttempt, and StopRequested if stopped while
        waiting.
        """
        while True:
            try:
                self._renew()
                self._recover()
                self._prepare()
                self._renew()
                return
            except Exception as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise DiskFull from error
                if not may_pass(error):
                    raise
                logger.warning("waiting: %s", error)
                if self.preempted.is_set() or self.lease.desired_state != "run":
                    raise StopRequested(f"stopped before it could start: {error}") from error
            time.sleep(OUTAGE_SECONDS)

    def _recover(self) -> None:
        """Record the rest of an earlier attempt's spool."""
        while not self.recorder.flush(meanwhile=self._renew_lease):
            self._renew()
        if self.recorder.problem:
            raise CannotRecord(self.recorder.problem)

    def _prepare(self) -> None:
        """Prepare everything the training needs. Raises CannotStart, StaleAttempt."""
        self.isolation.acquire()
        with self.database.writing() as session:
            run = queue.lock_active_attempt(session, self.run_id, self.attempt)
            started_at = clock() - queue.seconds_since_start(session, run)
            node = queue.node(session, self.run_id, self.attempt, self.node)
            worker = workers.get(session, node.worker_id)
            is_cuda = worker.devices[0]["kind"] == "cuda"
            attempt = Attempt(
                settings=self.settings,
                store=self.store,
                files=self.files,
                run=run,
                devices=node.devices,
                node=node.node,
                is_cuda=is_cuda,
                recipe=workers.reference(worker, run.recipe),
                recipe_file=workers.recipe_file(worker, run.recipe),
                started_at=started_at,
                seconds_before=queue.seconds_in_training(session, self.run_id),
                append_log=self.recorder.append_log,
                renew_lease=self._renew_lease,
                check_not_stopped=self._check_not_stopped,
                user=self.isolation.user,
                group=self.isolation.group,
                log=self.recorder.log,
                warm=self.warm,
            )
            kind = Command if run.source == COMMAND else Training
            self.work: Command | Training = kind(attempt, session)
        self.work.prepare()
        if isinstance(self.recorder, Recorder):
            self._describe_environment(worker, node.devices)
            monitor = SystemMonitor(node.devices if is_cuda else [])
            self.recorder.begin(monitor, started_at, run.settings.get("checkpoints", {}))

    def _describe_environment(self, worker: Worker, devices: list[int]) -> None:
        """Begin to describe the environment of a training; `_follow` records it.

        A user's recipe starts after that, since it may change the files described. A command
        describes them itself, before it starts.
        """
        started = self.work.describe_start()
        describe = partial(try_describe, started, worker, devices)
        self.environment = AttemptEnvironment(self.database, self.run_id, self.attempt, describe)
        if isinstance(self.work, Training):
            self.environment.begin()
            if started.folder != str(BUILT_IN):
                self.environment.wait(self._renew_lease)

    def _record_environment(self, child: Child, *, has_ended: bool) -> None:
        """Record the environment once it is described. Raises StaleAttempt."""
        environment, work = self.environment, self.work
        if environment is None:  # of another node than the first
            return
        if isinstance(work, Command) and not environment.has_begun:
            if not (has_ended or work.is_described()):
                return
            environment.begin()
        environment.record(partial(self._renew_lease, child), wait=has_ended)

    def _follow(self, child: Child) -> Outcome:
        """Record until the training ends and all its output is in the database."""
        renewal_due = pause = 0.0
        is_training = is_told = isinstance(self.work, Training) and not self.work.measures
        while True:
            code = child.exit_code()
            if code is not None:
                child.finish_listening()
                self.recorder.log.close()
                self.has_lost_lease = self.has_lost_lease or self.lease.has_expired
            try:
                if not is_told:  # of a training the first step reports that it runs
                    with self.database.writing() as session:
                        queue.run_command(session, self.run_id, self.attempt)
                    is_told = True
                self._record_environment(child, has_ended=code is not None)
                if clock() >= renewal_due:
                    self._acknowledge(self._renew(), child)
                    renewal_due = clock() + RENEWAL_SECONDS
                    self._warn_of_disk()
                is_drained = self.recorder.flush(
                    child.take_lines, meanwhile=partial(self._renew_lease, child)
                )
                if code is not None and is_drained and not self.recorder.finish():
                    self.is_recorded = True
                    return self._how_ended(code, child)
                if self.recorder.problem or (self.node_group and self.node_group.trouble):
                    child.kill()  # its earlier output is still recorded in full
                is_starting = is_training and not self.recorder.has_begun
                pause = FIRST_TICK_SECONDS if is_starting else TICK_SECONDS
            except Exception as error:
                if not may_pass(error):
                    raise
                # Pending items wait, the spool keeps new ones, and the watchdog continues to count.
                logger.warning("waiting: %s", error)
                pause = min(max(pause, TICK_SECONDS) * 2, OUTAGE_SECONDS)
            time.sleep(pause)

    def _renew(self) -> queue.DesiredState:
        """Renew the lease and exchange status with other nodes; return user requests.

        Raises StaleAttempt.
        """
        requested = self.lease.renew()
        if self.node_group:
            self.node_group.poll(self.database)
        return requested

    def _warn_of_disk(self) -> None:
        """Warn once, in the run's log and history, before the disk is full. Raises StaleAttempt."""
        if self.has_warned or (text := disk_space.shortage(self.settings)) is None:
            return
        self.has_warned = True
        self.recorder.append_log(text)
        with self.database.writing() as session:
            run = queue.lock_active_attempt(session, self.run_id, self.attempt)
            runs.remark(session, run, text)

    def _check_not_stopped(self) -> None:
        """Renew the lease during preparation. Raises StaleAttempt, StopRequested."""
        self._renew_lease()
        if self.preempted.is_set() or self.lease.desired_state != "run":
            raise StopRequested("stopped before it could start")

    def _renew_lease(self, child: Child | None = None) -> None:
        """Renew the lease if the database responds, and apply user requests.

        Raises StaleAttempt.
        """
        try:
            requested = self._renew()
            if child:
                self._acknowledge(requested, child)
        except Exception as error:
            if not may_pass(error):
                raise

    def _acknowledge(self, requested: queue.DesiredState, child: Child) -> None:
        """Apply user requests: kill the child or pass them to the work."""
        if requested.desired_state == "kill":
            child.kill()
        else:
            self.work.acknowledge(requested, child, is_preempted=self.preempted.is_set())

    def _how_ended(self, exit_code: int, child: Child) -> Outcome:
        """Return the outcome: a recording failure, or what the work reports."""
        if self.recorder.problem:
            return Outcome(Status.FAILED, self.recorder.problem, self.recorder.problem, "code")
        outcome = self.work.outcome(
            exit_code,
            child,
            is_preempted=self.preempted.is_set(),
            has_lost_lease=self.has_lost_lease,
        )
        if self.recorder.lost_bytes and outcome.status == Status.FINISHED:
            lost = f"{self.recorder.lost_bytes:,} bytes of its spool were damaged"
            text = f"{lost}: what they held is lost; the training itself finished"
            return Outcome(Status.FAILED, text, text, "infrastructure")
        return outcome

    def _close(self, outcome: Outcome) -> None:
        """Close this node's part; the first node closes the whole attempt.

        Raises StaleAttempt.
        """
        if self.node_group:
            outcome = self.node_group.settle(self.database, outcome)
        if self.node:
            return
        end_attempt(self.database, self.settings, self.run_id, self.attempt, outcome)
        if self.is_recorded and isinstance(self.recorder, Recorder):
            is_over = outcome.status in (Status.FINISHED, Status.FAILED, Status.CANCELLED)
            self.recorder.clear(is_over=is_over)


def main(warm: socket.socket | None = None) -> None:
    """Run the attempt given on the command line. warm: see Supervisor."""
    # A cluster sends SIGUSR2 to every process but means the worker. Child processes ignore it too,
    # unless they handle it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    close_to_others()
    run_id, attempt, *node = map(int, sys.argv[1:])
    settings = Settings.read()
    logs.configure("supervisor", settings.log_level, settings.log_format, sys.stderr)
    database = open_database(settings)
    supervisor = Supervisor(settings, database, run_id, attempt, *node, warm=warm)
    signal.signal(signal.SIGTERM, supervisor.preempt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.run()


def run_forked(begun: Begun) -> NoReturn:
    """Run the attempt in a forked process, which ends without the worker's own exit handlers."""
    code = 1
    try:
        main(socket.socket(fileno=begun.files[0]) if begun.files else None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
