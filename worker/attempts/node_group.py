"""One node's view of a multi-node attempt: exchanges status with other nodes."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil
from sqlalchemy import make_url

from db.database import Database
from db.errors import Invalid
from db.files import artifacts
from db.files.object_store import open_store, put_file
from db.queue import node_groups, queue
from db.settings import Settings
from db.tables import Status
from db.telemetry import telemetry
from halfstep import untrusted_files
from halfstep.clock import clock
from halfstep.sidecar.log_file import LogFile, forget_part
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import MOST_OF_RUN, Rendezvous, read_message, write_message
from halfstep.telemetry.events import Line
from worker.attempts.attempt import LOST_LEASE, Outcome
from worker.attempts.published_log import publish
from worker.attempts.recorder import may_pass
from worker.attempts.renew_lease import wait_for

logger = logging.getLogger(__name__)

#: Time that other nodes have to renew their leases after a database outage, as this one had.
GRACE_SECONDS = 5.0
#: Interval at which the first node checks whether the others have ended.
SETTLE_SECONDS = 0.4
#: Time between two polls; a longer gap means an outage.
POLL_SECONDS = 2.0
#: Share of a lease after which ranks that wait for each other raise.
TIMEOUT_SHARE = 0.4
#: Variables naming the interface by which ranks reach other machines: host and device backend.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class NodeGroup:
    """Other nodes of an attempt, as seen from one of them."""

    def __init__(self, settings: Settings, files: AttemptFiles, run_id: int, node: int) -> None:
        self._files, self._run_id, self._node = files, run_id, node
        self._settings = settings
        self._has_rendezvous = False
        self._polled_at, self._believed_until = 0.0, 0.0
        self.trouble: str | None = None  # failure of another node, for which this one must end

    def poll(self, database: Database) -> None:
        """Exchange the rendezvous address, and look for a failure of another node.

        Call it after each renewal of this node's lease. Raises StaleAttempt.
        """
        moment = clock()
        if moment - self._polled_at > POLL_SECONDS:
            self._believed_until = moment + GRACE_SECONDS
        self._polled_at = moment
        lease = self._settings.lease_seconds if moment > self._believed_until else math.inf
        attempt = self._files.attempt
        if not self._has_rendezvous:
            self._exchange_rendezvous(database)
        with database.reading() as session:
            reason = node_groups.stop_reason(session, self._run_id, attempt, self._node, lease)
        self.trouble = self.trouble or reason

    def settle(self, database: Database, outcome: Outcome) -> Outcome:
        """Report this node's outcome; as the first node, wait for all and combine them.

        Raises StaleAttempt.
        """
        run_id, attempt, own = self._run_id, self._files.attempt, make_reported_outcome(outcome)
        while True:
            try:
                if self._node:
                    with database.writing() as session:
                        node_groups.record_outcome(session, run_id, attempt, self._node, own)
                    return outcome
                blamed = close(database, self._settings, run_id, attempt, own)
                if blamed is not None:
                    return combine_outcomes(outcome, blamed, self.trouble)
            except Exception as error:
                if not may_pass(error):
                    raise
                logger.warning("waiting: %s", error)
            time.sleep(SETTLE_SECONDS)

    def _exchange_rendezvous(self, database: Database) -> None:
        """Publish the rendezvous address as node 0; pass it to the ranks as another."""
        run_id, attempt, path = self._run_id, self._files.attempt, self._files.rendezvous
        if self._node == 0 and untrusted_files.is_file(path.parent, path.name):
            address = read_message(path, Rendezvous, MOST_OF_RUN)
            with database.writing() as session:
                node_groups.set_rendezvous(session, run_id, attempt, address.host, address.port)
            self._has_rendezvous = True
        elif self._node:
            with database.reading() as session:
                known = node_groups.rendezvous(session, run_id, attempt)
            if known:
                write_message(path, Rendezvous(host=known[0], port=known[1]))
                self._has_rendezvous = True


class NodeLog:
    """Recorder of the lines that the ranks of any node but the first print.

    All lines are also stored in files of the run, like those of the first node.
    """

    def __init__(
        self, settings: Settings, database: Database, run_id: int, attempt: int, node: int
    ) -> None:
        self._settings, self._database = settings, database
        self._run_id, self._attempt = run_id, attempt
        self._folder = settings.run_folder(run_id, node)
        self.log = LogFile(self._folder, attempt, node)
        self._node = node
        self._pending: list[telemetry.LogRow] = []
        self.problem: str | None = None  # always None: lines can always be recorded
        self.lost_bytes = 0  # always 0: there is no spool to damage
        self.has_begun = True  # always: steps are recorded by the first node

    def append_log(self, text: str) -> None:
        """Add a line from Halfstep to the run's log."""
        self._take([Line(time=time.time(), stream="halfstep", text=text)])

    def finish(self) -> bool:
        """Return False: there is nothing more to flush."""
        return False

    def flush(
        self,
        take_lines: Callable[[], list[Line]] = list,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write new lines; return whether there were none. Raises StaleAttempt."""
        if not self._pending:
            self._take(take_lines())
        is_published = self._publish(meanwhile)
        if not self._pending:
            return is_published
        run_id, attempt, lines = self._run_id, self._attempt, self._pending
        with self._database.writing() as session:
            telemetry.number_lines(session, run_id, attempt, lines)
            telemetry.record(session, run_id, attempt, telemetry.Flush(log_lines=lines))
        self._pending = []
        return False

    def _publish(self, meanwhile: Callable[[], None]) -> bool:
        """Publish complete log parts; return whether there were none.

        Raises StaleAttempt.
        """
        has_parts = False
        for event in publish(self.log, self._folder, self.append_log, meanwhile):
            has_parts = True
            path = self._folder / event.path
            key = path.relative_to(self._settings.data).as_posix()
            store = open_store(self._settings)
            wait_for(partial(put_file, store, key, path), meanwhile)
            with self._database.writing() as session:
                artifacts.publish(
                    session, self._run_id, self._attempt, artifacts.log_artifact(event), key
                )
            forget_part(event.path, self._folder)
        return not has_parts

    def _take(self, lines: list[Line]) -> None:
        rows = [telemetry.LogRow.of(line, self._attempt) for line in lines]
        self._pending += [replace(row, text=f"[node {self._node}] {row.text}") for row in rows]


def make_reported_outcome(outcome: Outcome) -> node_groups.NodeOutcome:
    """Return the outcome that is reported to other nodes; without a failure they continue."""
    is_fine = outcome.status not in (None, Status.FAILED) and not (
        (outcome.status == Status.QUEUED and outcome.reason == LOST_LEASE)
        or (outcome.status == Status.PAUSED and outcome.failure_kind)  # by a full disk
    )
    failure_kind = None if is_fine else outcome.failure_kind or "infrastructure"
    return node_groups.NodeOutcome(outcome.reason, outcome.error, failure_kind)


def combine_outcomes(
    outcome: Outcome, blamed: node_groups.NodeOutcome, trouble: str | None
) -> Outcome:
    """Return how an attempt ended, from the first node's and the blamed node's outcome.

    trouble: the reason for which this node ended its training, if it did.
    """
    if outcome.status == Status.QUEUED and blamed.reason:
        return replace(outcome, reason=blamed.reason)
    if outcome.status not in (None, Status.FAILED):  # as users requested, or normally
        return outcome
    is_own = outcome.status == Status.FAILED and outcome.failure_kind != node_groups.RANK
    if is_own and trouble is None:
        return outcome
    if blamed.failure_kind and blamed.failure_kind != "infrastructure":
        return Outcome(Status.FAILED, blamed.reason, blamed.error, blamed.failure_kind)
    return Outcome(None, trouble or blamed.reason or outcome.reason)


def close(
    database: Database,
    settings: Settings,
    run_id: int,
    attempt: int,
    outcome: node_groups.NodeOutcome,
) -> node_groups.NodeOutcome | None:
    """Report the outcome of node 0 and check whether the other nodes have ended.

    Returns the outcome of the other node that is to blame, an empty one if there is none, and None
    while some may still be training. Raises StaleAttempt.
    """
    with database.writing() as session:
        node_groups.record_outcome(session, run_id, attempt, 0, outcome)
        queue.renew(session, run_id, attempt, settings.lease_seconds)
        if not node_groups.others_have_ended(session, run_id, attempt):
            return None
        return node_groups.cause(session, run_id, attempt) or node_groups.NodeOutcome()


def environment(settings: Settings) -> dict[str, str]:
    """Return variables for the ranks' network interface; those already set take precedence."""
    name, _address = interface(settings)
    return {variable: os.environ.get(variable, name) for variable in INTERFACES}


def interface(settings: Settings) -> tuple[str, str]:
    """Return name and address of the interface by which other nodes reach this one.

    Raises Invalid if HALFSTEP_NETWORK_INTERFACE names one without an IPv4 address.
    """
    addresses = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    if settings.network_interface:
        named = [row for row in addresses if row[0] == settings.network_interface]
        if not named:
            names = ", ".join(sorted({name for name, _ in addresses}))
            message = f"{settings.network_interface!r} has no IPv4 address here; there are {names}"
            raise Invalid({"HALFSTEP_NETWORK_INTERFACE": message})
        return named[0]
    own = _find_own_address(make_url(settings.database_url).host or "localhost")
    return next((row for row in addresses if row[1] == own), ("lo", "127.0.0.1"))


def _find_own_address(host: str) -> str:
    """Return this machine's address on the route to a host; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # unknown name, or no route
            return "127.0.0.1"
        return str(probe.getsockname()[0])
