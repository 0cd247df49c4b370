"""Attempts whose supervisor died before their run ended."""

import logging

from obstore.store import ObjectStore

from db.database import Database
from db.errors import StaleAttempt
from db.queue import node_groups, queue
from db.queue.node_groups import NodeOutcome
from db.settings import Settings
from db.tables import RunNode, Status
from worker.attempts import node_group
from worker.attempts.attempt import Outcome, end_attempt
from worker.attempts.recorder import CannotRecord, Recorder, in_short, may_pass

logger = logging.getLogger(__name__)


class LostAttempts:
    """Closes lost attempts of this machine."""

    def __init__(self, settings: Settings, database: Database, store: ObjectStore) -> None:
        self._settings, self._database, self._store = settings, database, store

    def close(self, node: RunNode) -> bool:
        """Close a lost attempt, whatever is left of it. Raises StaleAttempt.

        Returns False if it cannot be closed yet.
        """
        try:
            return self._end(node)
        except Exception as error:
            if isinstance(error, StaleAttempt) or may_pass(error):
                raise
            failure_kind = "code" if isinstance(error, CannotRecord) else "infrastructure"
            reason = str(error) if failure_kind == "code" else in_short(error)
            self.fail(node.run_id, node.attempt, reason, failure_kind=failure_kind)
            return True

    def _end(self, node: RunNode) -> bool:
        """Record the remaining spool and close the attempt.

        Returns False if another node may still be training. For a node other than the first, only
        reports its outcome to the first. Raises StaleAttempt, CannotRecord.
        """
        run_id, attempt = node.run_id, node.attempt
        reason = f"its supervisor died in attempt {attempt}"
        outcome = NodeOutcome(reason, failure_kind="infrastructure")
        if node.node:
            with self._database.writing() as session:  # unless the node reported it itself
                node_groups.record_outcome(session, run_id, attempt, node.node, outcome)
            return True
        recorder = Recorder(self._settings, self._database, self._store, run_id, attempt)

        def renew() -> None:
            with self._database.writing() as session:
                queue.renew(session, run_id, attempt, self._settings.lease_seconds)

        recorder.log.close()
        while not recorder.flush(meanwhile=renew) or recorder.finish():
            pass
        if recorder.problem:
            raise CannotRecord(recorder.problem)
        if node_group.close(self._database, self._settings, run_id, attempt, outcome) is None:
            return False
        killed, log = Outcome(None, reason), self._supervisor_log(run_id, attempt)
        end_attempt(self._database, self._settings, run_id, attempt, killed, log)
        logger.warning("%s", reason, extra={"run": run_id})
        return True

    def _supervisor_log(self, run_id: int, attempt: int) -> str:
        path = self._settings.run_folder(run_id) / f"supervisor-{attempt}.log"
        if path.is_symlink() or not path.exists():  # a link made by the run can point anywhere
            return "it left no log"
        return path.read_text(errors="replace")[-8000:]

    def fail(self, run_id: int, attempt: int, reason: str, *, failure_kind: str) -> None:
        """End an attempt as failed. Raises StaleAttempt."""
        logger.error("%s", reason, extra={"run": run_id})
        outcome = Outcome(Status.FAILED, reason, reason, failure_kind)
        end_attempt(self._database, self._settings, run_id, attempt, outcome)
