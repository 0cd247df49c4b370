"""Nodes of runs that train on this machine, each with a supervisor."""

import logging
import signal
import sys
import time
from contextlib import suppress

from obstore.store import ObjectStore

from db.database import Database, is_outage
from db.errors import StaleAttempt
from db.queue import queue
from db.settings import Settings
from db.tables import RunNode
from worker.attempts.lost_attempts import LostAttempts
from worker.attempts.recorder import may_pass
from worker.engine import AlreadyLaunched, Handle, SubprocessEngine
from worker.warm_start import WarmProcess

logger = logging.getLogger(__name__)

#: An attempt: run id and number.
Attempt = tuple[int, int]


class RunningNodes:
    """The nodes of this worker, and their supervisors."""

    def __init__(
        self, settings: Settings, database: Database, store: ObjectStore, engine: SubprocessEngine
    ) -> None:
        self.nodes: dict[Attempt, tuple[Handle, RunNode]] = {}
        self._settings, self._database, self._engine = settings, database, engine
        self._lost = LostAttempts(settings, database, store)
        self._stopped: set[Attempt] = set()  # sent SIGTERM because this worker is drained

    @property
    def devices(self) -> set[int]:
        """Indexes of the devices that are in use."""
        return {index for _handle, node in self.nodes.values() for index in node.devices}

    @property
    def has_ended(self) -> bool:
        """Whether a supervisor has exited."""
        return not all(self._engine.is_alive(handle) for handle, _node in self.nodes.values())

    def adopt(self, worker_id: int) -> None:
        """Adopt supervisors left running by an earlier worker of this name."""
        with self._database.reading() as session:
            nodes = queue.nodes_of_worker(session, worker_id)
        for node in nodes:
            folder = self._settings.run_folder(node.run_id, node.node)
            handle = self._engine.adopt(folder, node.attempt)
            self.nodes[node.run_id, node.attempt] = (handle, node)

    def launch(self, node: RunNode, environment: dict[str, str], warm: WarmProcess | None) -> None:
        """Start the supervisor of a node, or fail its run.

        environment: of the supervisor, in addition.  warm: forks the training.
        """
        part = f" as node {node.node}" if node.node else ""
        text = f"attempt {node.attempt}{part} on device {node.devices}"
        logger.info("%s", text, extra={"run": node.run_id})
        folder = self._settings.run_folder(node.run_id, node.node)
        words = map(str, (node.run_id, node.attempt, node.node))
        argv = [sys.executable, "-m", "worker.attempts.supervisor", *words]
        connection = warm.connect() if warm else None
        try:
            handle = self._engine.launch(folder, node.attempt, argv, environment, connection)
        except (AlreadyLaunched, OSError) as error:
            # Such as a data folder that belongs to another database.
            reason = f"its supervisor could not be started in {folder}: {error}"
            with suppress(StaleAttempt):
                self._lost.fail(node.run_id, node.attempt, reason, failure_kind="infrastructure")
            return
        finally:
            if connection:
                connection.close()
        self.nodes[node.run_id, node.attempt] = (handle, node)

    def reap(self) -> None:
        """Release supervisors that exited, and close the attempts they lost.

        An attempt is lost if its supervisor died before its run ended. An error in one run does not
        prevent the others from being checked.
        """
        for (run_id, attempt), (handle, node) in list(self.nodes.items()):
            if self._engine.is_alive(handle):
                continue
            try:
                with suppress(StaleAttempt):
                    if not self._lost.close(node):
                        continue
            except Exception as error:
                if is_outage(error):
                    raise
                if may_pass(error):  # its disk or bucket: try again next time
                    continue
                logger.exception("it cannot be closed", extra={"run": run_id})
            self._engine.release(handle)
            del self.nodes[run_id, attempt]
            self._stopped.discard((run_id, attempt))

    def preempt(self) -> None:
        """Request once that each training save a checkpoint and be requeued."""
        for attempt, (handle, _node) in self.nodes.items():
            if attempt not in self._stopped:
                self._engine.signal(handle, signal.SIGTERM)
                self._stopped.add(attempt)

    def stop(self) -> None:
        """Checkpoint and requeue all trainings; kill them after stop_grace_seconds."""
        for handle, _node in self.nodes.values():
            self._engine.signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + self._settings.stop_grace_seconds
        while self.nodes and time.monotonic() < deadline:
            time.sleep(0.1)
            self.reap()
        for handle, _node in self.nodes.values():
            self._engine.signal(handle, signal.SIGKILL)
        while any(self._engine.is_alive(handle) for handle, _node in self.nodes.values()):
            time.sleep(0.1)
        self.reap()  # the next worker of this name finds those waiting for a bucket
