"""Lease of an attempt on one node, and the guard that ends a training without one."""

import threading

from db.database import Database
from db.queue import queue
from db.settings import Settings
from halfstep.clock import clock
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import Lease, write_message
from worker.attempts.child import Child

#: Shares of the lease after which a training whose lease could not be renewed is asked to leave a
#: checkpoint and end, and is killed: well before another worker may start it.
ASK_SHARE, KILL_SHARE = 0.5, 0.7


class AttemptLease:
    """Lease of an attempt, which its supervisor renews."""

    def __init__(
        self, settings: Settings, database: Database, files: AttemptFiles, run_id: int, node: int
    ) -> None:
        self._seconds, self._database = settings.lease_seconds, database
        self._files, self._run_id, self._node = files, run_id, node
        self._lease = Lease(ask=0.0, kill=0.0)
        self.desired_state = "run"  # state requested by users at the last renewal

    @property
    def has_expired(self) -> bool:
        """Whether the training must have ended."""
        return clock() > self._lease.kill

    def renew(self) -> queue.DesiredState:
        """Renew it, also for the training's guard; return user requests. Raises StaleAttempt."""
        before = clock()  # to be safe, the lease counts from before the request
        with self._database.writing() as session:
            requested = queue.renew(
                session, self._run_id, self._files.attempt, self._seconds, self._node
            )
        self.desired_state = requested.desired_state
        ask, kill = before + ASK_SHARE * self._seconds, before + KILL_SHARE * self._seconds
        self._lease = Lease(ask=ask, kill=kill)
        write_message(self._files.lease, self._lease)
        return requested

    def guard(self, child: Child, ended: threading.Event) -> None:
        """Kill a training whose lease cannot be renewed; never waits for the database.

        The training's own guard has requested a checkpoint by then, and also kills it if this
        process is stopped.
        """
        while not ended.wait(min(0.5, self._seconds / 20)):
            if self.has_expired:
                child.kill()
