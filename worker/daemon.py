"""Worker daemon, without torch: registers devices, claims and monitors runs.

Each run has its own supervisor, which outlives this process: a restarted worker finds its
supervisors again.
"""

import logging
import os
import random
import signal
import socket
import threading
import time
from queue import Empty, SimpleQueue

from msgspec.structs import replace
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db.alerts.notifications import SIGNED_IN, Listener
from db.database import Database, open_database
from db.errors import HalfstepError
from db.files.object_store import check_store, open_store
from db.queue import claims, queue, workers
from db.settings import Settings
from db.tables import RunNode
from halfstep import fork_server
from halfstep.cli import logs
from halfstep.fork_server import ForkServer
from halfstep.machine_offer import MachineOffer, rows
from worker import cleanup
from worker.attempts.recorder import in_short, may_pass
from worker.attempts.scratch_folders import divide_all
from worker.attempts.supervisor import run_forked
from worker.capabilities import Capabilities
from worker.disk_space import DiskSpace
from worker.engine import SubprocessEngine, key_in
from worker.expired_leases import ExpiredLeases
from worker.names import lock_name, lock_path, name_of
from worker.running_nodes import RunningNodes
from worker.sandbox.available_limits import available_limits
from worker.warm_start import WarmProcess

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
#: How often to look, without a query, for a change of SQLite's file or the end of a supervisor.
GLANCE_SECONDS = 0.05
#: Workers notified of the same run spread their wake-ups randomly over this time.
SPREAD_SECONDS = 0.05
#: Heartbeat intervals; the longer one applies while notifications arrive for everything else.
BEAT_SECONDS, QUIET_BEAT_SECONDS = 3.0, 5.0
#: How long a single-run worker waits for its run to be claimed; other nodes may have to start.
PILOT_SECONDS = 120.0


class NoDevices(HalfstepError):
    """This machine has no GPU and HALFSTEP_CPU_DEVICES is 0; allowed is 1 or more."""


class Worker:
    """Worker process that claims and monitors runs on one machine."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        only: int | None = None,
        supervisors: ForkServer | None = None,
        warm: WarmProcess | None = None,
    ) -> None:
        """only: id of the only run to train; the worker exits when that run ends.

        supervisors, warm: fork supervisors and trainings; None: they are started as programs.
        """
        self.settings = settings
        self.database = database
        self.only = only
        self.without: dict[str, str] = {}  # environment that disables unavailable limits
        self.may_have_work = True
        self.name = name_of(settings, only)
        self.engine = SubprocessEngine(key_in(settings.data), supervisors)
        self.warm = warm
        self.capabilities = Capabilities(settings, warm)
        self.running = RunningNodes(settings, database, open_store(settings), self.engine)
        self.lost = ExpiredLeases(database, settings.lease_seconds)
        self.stopping = threading.Event()
        # Signal handlers may add to a SimpleQueue at any moment, but not set an Event waited on.
        self.wakeups: SimpleQueue[set[int]] = SimpleQueue()
        self.listener = Listener(database, self.wakeups.put)
        self.disk = DiskSpace(settings)

    def run(self) -> None:
        """Claim and monitor runs until stopped, then stop them resumably."""
        self._name_lock = lock_name(self.settings, self.only)
        self._register()
        self.running.adopt(self.id)
        self.listener.start()
        cleanup.start(self.settings, self.database, self.stopping)
        self.beat_due = 0.0
        self.is_notified = self.has_changed = False  # by a notification; SQLite's file
        self.log_state, self.ignored_until = self.database.log_state(), 0.0
        self.wakeups.put(set())  # the first turn does not wait
        problem: str | None = None
        is_away = False
        self.idle_since = time.monotonic()
        while not self.stopping.is_set():
            self._wait_for_notification()
            try:
                os.utime(lock_path(self.settings, self.only))  # `is_healthy` checks this mtime
                self._reap()
                if time.monotonic() >= self.beat_due:
                    self._send_heartbeat()
                    self._update_recipes()  # checks the recipe files, also once per heartbeat
                    if self.warm:
                        self.warm.check()
                    is_quiet = self.listener.is_listening and not self.lost
                    pause = QUIET_BEAT_SECONDS if is_quiet else BEAT_SECONDS
                    self.beat_due = time.monotonic() + pause
                elif self.is_notified:
                    with self.database.read_only() as session:
                        self._apply_heartbeat(workers.pending_work(session, self.id))
                self.is_notified = False
                if self.capabilities.is_loading:
                    self._update_recipes()
                if self.may_have_work or (self.is_tick and not self.listener.is_listening):
                    before = set(self.running.nodes)
                    self._pick_up()
                    self._claim()
                    if (
                        self.has_changed
                        and self.may_have_work
                        and before.issuperset(self.running.nodes)
                    ):
                        # A queued run cannot start here, and each flush of a training is a change.
                        self.ignored_until = time.monotonic() + TICK_SECONDS
                    self.may_have_work = False
                if self._is_done():
                    break
                if self.listener.problem not in (None, problem):
                    problem = self.listener.problem
                    logger.warning("polls the queue every %g s: %s", TICK_SECONDS, problem)
                is_away = False
            except Exception as error:
                if not may_pass(error):
                    raise
                if not is_away:  # logged once per outage
                    logger.warning("waiting: %s", error)
                self.lost.note_outage()
                is_away = True
        self.listener.close()
        self.capabilities.close()
        self.running.stop()
        if self.warm:
            self.warm.close()
        self.engine.close()
        with self.database.writing() as session:
            workers.stop(session, self.id)

    def stop(self, *_signal: object) -> None:
        """Request that the loop stop soon."""
        self.stopping.set()
        self.wakeups.put(set())

    def _wait_for_notification(self) -> None:
        """Wait up to one tick for a notification of work, or for a sign of it."""
        until = time.monotonic() + TICK_SECONDS
        has_signs = bool(self.running.nodes) or self.database.log_state() is not None
        self.is_tick = self.has_changed = False
        while True:
            try:
                timeout = min(GLANCE_SECONDS, TICK_SECONDS) if has_signs else TICK_SECONDS
                notified = self.wakeups.get(timeout=timeout)
                break
            except Empty:
                self.is_tick = time.monotonic() >= until
                self.has_changed = self._has_database_changed()
                self.is_notified |= self.has_changed
                if self.is_tick or self.has_changed or self.running.has_ended:
                    return
        if SIGNED_IN in notified:  # the first worker claims it; later ones find none
            time.sleep(random.uniform(0.0, SPREAD_SECONDS))  # noqa: S311 - no secret
        while not self.wakeups.empty():
            notified |= self.wakeups.get()
        self.is_notified |= not notified.isdisjoint((SIGNED_IN, self.id))

    def _has_database_changed(self) -> bool:
        """Return whether SQLite's file has changed, if there is a device for a run."""
        if time.monotonic() < self.ignored_until:
            return False
        before, self.log_state = self.log_state, self.database.log_state()
        return self.log_state != before and bool(self._free_devices())

    def _is_done(self) -> bool:
        """Return whether a single-run worker can exit: its run ended or waited too long.

        A multi-node run cannot start if one of its nodes has been lost.
        """
        if self.only is None or self.running.nodes:
            self.idle_since = time.monotonic()
            return False
        with self.database.reading() as session:
            is_ours = bool(queue.nodes_of_worker(session, self.id))
            is_queued = queue.is_queued(session, self.only)
        return not (is_ours or is_queued) or time.monotonic() - self.idle_since > PILOT_SECONDS

    def _register(self) -> None:
        """Detect what this machine offers and register it. Raises NoDevices."""
        offer = self.capabilities.learn()
        cpu = offer.devices[0]
        if cpu.kind == "cpu":
            copies = [replace(cpu, index=i) for i in range(self.settings.cpu_devices)]
            offer = replace(offer, devices=copies)
        if not offer.devices:
            raise NoDevices
        devices, recipes = rows(offer.devices), rows(offer.recipes)
        self.device_indexes = {device.index for device in offer.devices}
        self.recipes = workers.recipe_names(recipes)
        self.device_memory_bytes = workers.device_memory_bytes(devices)
        self.precisions = workers.precisions(devices)
        with self.database.reading() as session:
            active = queue.active_runs(session)
        divide_all(self.settings, active)
        named = (path for recipe in offer.recipes for path in (recipe.file, recipe.source))
        files = {path for path in named if isinstance(path, str)}
        limits = available_limits(self.settings, len(offer.devices), files)
        self.without = limits.without
        with self.database.writing() as session:
            worker = workers.register(
                session,
                name=self.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                offers_commands=self.settings.allow_commands,
                is_sandboxed=self.settings.sandbox and "sandbox" not in limits.obstacles,
                sandbox=limits.obstacles,
                only_run_id=self.only,
                devices=devices,
                recipes=recipes,
                versions=offer.versions,
            )
            self.id = worker.id
        offered = [*_names(offer), *(["commands"] if self.settings.allow_commands else [])]
        machine = f"{len(offer.devices)} x {cpu.name}"
        logger.info("%s offers %s: %s", self.name, machine, ", ".join(offered))

    def _update_recipes(self) -> None:
        """Update the offered recipes; devices and versions stay the same."""
        offer = self.capabilities.poll_changes()
        if offer is None:
            return
        with self.database.writing() as session:
            workers.offer(session, self.id, rows(offer.recipes))
        self.recipes = workers.recipe_names(rows(offer.recipes))
        self.may_have_work = True
        logger.info("%s offers %s", self.name, ", ".join(_names(offer)))

    def _claim(self) -> None:
        """Start queued runs while there are free devices and disk space for them."""
        if self.disk.is_short():
            return
        while free := self._free_devices():
            node = self._next(free)
            if node is None:
                return
            self._launch(node)

    def _pick_up(self) -> None:
        """Start this worker's nodes of multi-node runs that other workers have claimed.

        A device is not free while the previous supervisor on it is still exiting.
        """
        with self.database.read_only() as session:
            nodes = queue.nodes_of_worker(session, self.id)
        for node in nodes:
            is_new = (node.run_id, node.attempt) not in self.running.nodes
            if is_new and self._free_devices().issuperset(node.devices):
                self._launch(node)

    def _next(self, free: set[int]) -> RunNode | None:
        """Claim a run; if one cannot be claimed, fail it and try again."""
        try:
            with self.database.writing() as session:
                return self._take(session, free)
        except Exception as error:
            if may_pass(error):
                raise
            self._fail_unclaimable(free)
        with self.database.writing() as session:
            return self._take(session, free)

    def _take(self, session: Session, free: set[int], only: int | None = None) -> RunNode | None:
        run = claims.claim(
            session,
            self.id,
            recipes=self.recipes,
            precisions=self.precisions,
            free_devices=free,
            device_memory_bytes=self.device_memory_bytes,
            lease_seconds=self.settings.lease_seconds,
            **self.settings.per_user,
            reserve_after_seconds=self.settings.reserve_after_seconds,
            commands=self.settings.allow_commands,
            only=self.only or only,
        )
        return None if run is None else queue.node(session, run.id, run.attempt)

    def _fail_unclaimable(self, free: set[int]) -> None:
        """Fail each queued run whose claim raises, so that others can be claimed."""
        with self.database.reading() as session:
            run_ids = queue.list_queued(session) if self.only is None else [self.only]
        for run_id in run_ids:
            try:
                with self.database.writing() as session:
                    self._take(session, free, only=run_id)
                    session.rollback()  # only a trial claim
            except Exception as error:
                if may_pass(error):
                    raise
                reason = f"it cannot be claimed: {in_short(error)}"
                logger.error("%s", reason, extra={"run": run_id})
                with self.database.writing() as session:
                    queue.fail_unclaimable(session, run_id, reason)

    def _free_devices(self) -> set[int]:
        return self.device_indexes - self.running.devices

    def _launch(self, node: RunNode) -> None:
        self.running.launch(node, self.without, self.warm)

    def _reap(self) -> None:
        """Close ended attempts; their devices are free for others, even if one cannot be closed."""
        before = len(self.running.nodes)
        try:
            self.running.reap()
        finally:
            self.may_have_work |= len(self.running.nodes) < before

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, apply its reply, and poll for lost runs of other workers.

        Raises Conflict if another version has migrated the database.
        """
        memory = self.warm.memory_bytes() if self.warm else None
        try:
            with self.database.single_write() as session:
                pending = workers.heartbeat(session, self.id, memory)
                self.database.require_current(pending.revision)
        except DBAPIError:  # of tables that are others
            self.database.require_current()
            raise
        self._apply_heartbeat(pending)  # a lost notification costs at most one heartbeat interval
        self.lost.check(is_lost=pending.is_lost)

    def _apply_heartbeat(self, pending: workers.PendingWork) -> None:
        """Apply a stop request, and note whether there may be work."""
        has_room = pending.is_queued and bool(self._free_devices())
        self.may_have_work |= has_room or pending.nodes != len(self.running.nodes)
        if pending.is_stopped:
            self.running.preempt()


def _names(offer: MachineOffer) -> list[str]:
    return [recipe.name for recipe in offer.recipes if recipe.is_offered]


def run(settings: Settings, only: int | None, warm: WarmProcess | None) -> None:
    """Train runs until a signal. Call it while this process has one thread. Raises HalfstepError.

    only, warm: see Worker.
    """
    supervisors = None
    if warm:  # the first of all: a process is forked while no database or lock is open
        supervisors = fork_server.start(run_forked, "halfstep: forks supervisors", warm.release)
    database = open_database(settings)
    database.migrate()
    check_store(settings)
    logs.configure("worker", settings.log_level, settings.log_format)
    worker = Worker(settings, database, only, supervisors, warm)
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGUSR2, worker.stop)  # sent by a cluster when the time limit is near
    signal.signal(signal.SIGINT, worker.stop)
    worker.run()
