"""Worker daemon, without torch: registers devices, claims and monitors runs.

Each run has its own supervisor, which outlives this process: a restarted worker finds its
supervisors again.
"""

import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from msgspec.structs import replace
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db.alerts.notifications import SIGNED_IN, Listener
from db.database import Database, is_outage, open_database
from db.errors import HalfstepError, Invalid, StaleAttempt
from db.files.object_store import check_store, open_store
from db.queue import claims, node_groups, queue, workers
from db.queue.node_groups import NodeOutcome
from db.settings import Settings
from db.tables import RunNode, Status
from halfstep import fork_server
from halfstep.cli import logs
from halfstep.fork_server import ForkServer
from halfstep.machine_offer import MachineOffer, rows
from halfstep.telemetry.folder_lock import FolderLock
from worker import cleanup, disk_space
from worker.attempts import node_group
from worker.attempts.recorder import CannotRecord, Recorder, in_short, may_pass
from worker.attempts.scratch_folders import divide_all
from worker.attempts.supervisor import run_forked
from worker.capabilities import Capabilities
from worker.engine import AlreadyLaunched, Handle, SubprocessEngine, key_in
from worker.expired_leases import ExpiredLeases
from worker.names import lock_path, name_of
from worker.sandbox import cgroup_limits, run_users, sandbox
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

#: An attempt: run id and number.
Attempt = tuple[int, int]


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
        self.without: dict[str, str] = {}  # environment overrides that disable unavailable limits
        self.name = name_of(settings, only)
        self.engine = SubprocessEngine(key_in(settings.data), supervisors)
        self.store = open_store(settings)
        self.warm = warm
        self.capabilities = Capabilities(settings, warm)
        self.running: dict[Attempt, tuple[Handle, RunNode]] = {}
        self.lost = ExpiredLeases(database, settings.lease_seconds)
        self.stopping = threading.Event()
        # Signal handlers may add to a SimpleQueue at any moment, but not set an Event waited on.
        self.wakeups: SimpleQueue[set[int]] = SimpleQueue()
        self.listener = Listener(database, self.wakeups.put)
        self.has_shortage = False  # of disk space
        self.stopped: set[Attempt] = set()  # attempts sent SIGTERM because this worker is drained

    def run(self) -> None:
        """Claim and monitor runs until stopped, then stop them resumably."""
        self._lock_name()
        self._register()
        self._adopt()
        self.listener.start()
        cleanup.start(self.settings, self.database, self.stopping)
        self.beat_due = 0.0
        self.may_have_work, self.is_notified = True, False
        self.log_state, self.ignored_until = self.database.log_state(), 0.0
        self.has_changed = False  # SQLite's file; the turn is due to that
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
                    before = set(self.running)
                    self._pick_up()
                    self._claim()
                    if self.has_changed and self.may_have_work and before.issuperset(self.running):
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
        self._stop_runs()
        if self.warm:
            self.warm.close()
        self.engine.close()
        with self.database.writing() as session:
            workers.stop(session, self.id)

    def stop(self, *_signal: Any) -> None:
        """Request that the loop stop soon."""
        self.stopping.set()
        self.wakeups.put(set())

    def _wait_for_notification(self) -> None:
        """Wait up to one tick for a notification of work, or for a sign of it."""
        until = time.monotonic() + TICK_SECONDS
        has_signs = bool(self.running) or self.database.log_state() is not None
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
                if self.is_tick or self.has_changed or self._has_supervisor_ended():
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

    def _has_supervisor_ended(self) -> bool:
        return not all(self.engine.is_alive(handle) for handle, _node in self.running.values())

    def _is_done(self) -> bool:
        """Return whether a single-run worker can exit: its run ended or waited too long.

        A multi-node run cannot start if one of its nodes has been lost.
        """
        if self.only is None or self.running:
            self.idle_since = time.monotonic()
            return False
        with self.database.reading() as session:
            is_ours = bool(queue.nodes_of_worker(session, self.id))
            is_queued = queue.is_queued(session, self.only)
        return not (is_ours or is_queued) or time.monotonic() - self.idle_since > PILOT_SECONDS

    def _lock_name(self) -> None:
        """Lock this worker's name. Raises Invalid if it is taken.

        Two workers with the same name would adopt each other's runs.
        """
        self._name_lock = FolderLock(lock_path(self.settings, self.only))
        if not self._name_lock.acquire():
            message = f"a worker named {self.name!r} is already running here; choose another name"
            raise Invalid({"HALFSTEP_WORKER_NAME": message})

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
        obstacles = self._unavailable_limits(len(offer.devices))
        named = [path for each in offer.recipes for path in (each.file, each.source)]
        files = {path for path in named if isinstance(path, str)}
        if obstacle := self._sandbox_obstacle(files):
            obstacles["sandbox"] = obstacle
        with self.database.writing() as session:
            worker = workers.register(
                session,
                name=self.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                offers_commands=self.settings.allow_commands,
                is_sandboxed=self.settings.sandbox and "sandbox" not in obstacles,
                sandbox=obstacles,
                only_run_id=self.only,
                devices=devices,
                recipes=recipes,
                versions=offer.versions,
            )
            self.id = worker.id
        offered = [*_names(offer), *(["commands"] if self.settings.allow_commands else [])]
        machine = f"{len(offer.devices)} x {cpu.name}"
        logger.info("%s offers %s: %s", self.name, machine, ", ".join(offered))

    def _sandbox_obstacle(self, recipe_files: set[str]) -> str:
        """Return why the sandbox enabled in the settings is ineffective, or ""."""
        if not self.settings.sandbox:
            return ""
        changes = {
            "run_users": self.without.get("HALFSTEP_RUN_USERS", self.settings.run_users),
            "sandbox_namespaces": "HALFSTEP_SANDBOX_NAMESPACES" not in self.without,
        }
        settings = self.settings.model_copy(update=changes)
        if reason := sandbox.obstacle(settings, recipe_files):
            logger.warning("the sandbox is ineffective: %s", reason)
        return reason

    def _unavailable_limits(self, devices: int) -> dict[str, str]:
        """Return why each configured limit is unavailable, or "" if it is available.

        Supervisors are started with the unavailable ones disabled.
        """
        settings, reasons = self.settings, {}
        if settings.sandbox and (reason := sandbox.namespaces_obstacle(settings)):
            reasons["namespaces"] = reason
            self.without["HALFSTEP_SANDBOX_NAMESPACES"] = "no"
            settings = settings.model_copy(update={"sandbox_namespaces": False})
        if settings.run_users:
            reasons["users"] = run_users.obstacle(settings, devices)
        if reasons.get("users"):
            self.without["HALFSTEP_RUN_USERS"] = ""
            settings = settings.model_copy(update={"run_users": ""})
        if settings.run_users and settings.run_processes:
            reasons["processes"] = ""
        limits = cgroup_limits.asked(settings)
        why = cgroup_limits.obstacle(settings) if limits else ""
        for name in limits:
            reasons[name.removeprefix("run_").removesuffix("_gib")] = why
            if why:
                self.without[f"HALFSTEP_{name}".upper()] = "0"
        for name, reason in reasons.items():
            if reason:
                logger.warning("runs start without a configured limit, %s: %s", name, reason)
        return reasons

    def _update_recipes(self) -> None:
        """Update the offered recipes; devices and versions stay the same."""
        offer = self.capabilities.changed_offer()
        if offer is None:
            return
        with self.database.writing() as session:
            workers.offer(session, self.id, rows(offer.recipes))
        self.recipes = workers.recipe_names(rows(offer.recipes))
        self.may_have_work = True
        logger.info("%s offers %s", self.name, ", ".join(_names(offer)))

    def _adopt(self) -> None:
        """Adopt supervisors left running by an earlier worker of this name."""
        with self.database.reading() as session:
            nodes = queue.nodes_of_worker(session, self.id)
        for node in nodes:
            folder = self.settings.run_folder(node.run_id, node.node)
            handle = self.engine.adopt(folder, node.attempt)
            self.running[node.run_id, node.attempt] = (handle, node)

    def _claim(self) -> None:
        """Start queued runs while there are free devices and disk space for them."""
        shortage = disk_space.shortage(self.settings)
        if shortage and not self.has_shortage:  # logged once
            logger.warning("starts no run: %s", shortage)
        self.has_shortage = shortage is not None
        while not shortage and (free := self._free_devices()):
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
            is_new = (node.run_id, node.attempt) not in self.running
            if is_new and self._free_devices().issuperset(node.devices):
                self._launch(node)

    def _launch(self, node: RunNode) -> None:
        """Start the supervisor of a node, or fail its run."""
        part = f" as node {node.node}" if node.node else ""
        text = f"attempt {node.attempt}{part} on device {node.devices}"
        logger.info("%s", text, extra={"run": node.run_id})
        folder = self.settings.run_folder(node.run_id, node.node)
        words = map(str, (node.run_id, node.attempt, node.node))
        argv = [sys.executable, "-m", "worker.attempts.supervisor", *words]
        warm = self.warm.connect() if self.warm else None
        try:
            handle = self.engine.launch(folder, node.attempt, argv, self.without, warm)
        except (AlreadyLaunched, OSError) as error:
            # Such as a data folder that belongs to another database.
            reason = f"its supervisor could not be started in {folder}: {error}"
            with suppress(StaleAttempt):
                self._fail(node.run_id, node.attempt, reason, failure_kind="infrastructure")
            return
        finally:
            if warm:
                warm.close()
        self.running[node.run_id, node.attempt] = (handle, node)

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
            run_ids = queue.queued(session) if self.only is None else [self.only]
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

    def _fail(self, run_id: int, attempt: int, reason: str, *, failure_kind: str) -> None:
        logger.error("%s", reason, extra={"run": run_id})
        with self.database.writing() as session:
            queue.end(
                session,
                run_id,
                attempt,
                Status.FAILED,
                reason=reason,
                error=reason,
                failure_kind=failure_kind,
            )

    def _free_devices(self) -> set[int]:
        taken = {index for _handle, node in self.running.values() for index in node.devices}
        return self.device_indexes - taken

    def _reap(self) -> None:
        """Release supervisors that exited, and close the attempts they lost.

        An attempt is lost if its supervisor died before its run ended. An error in one run does not
        prevent the others from being checked.
        """
        for (run_id, attempt), (handle, node) in list(self.running.items()):
            if self.engine.is_alive(handle):
                continue
            try:
                with suppress(StaleAttempt):
                    if not self._close_lost(node):
                        continue
            except Exception as error:
                if is_outage(error):
                    raise
                if may_pass(error):  # its disk or bucket: try again next time
                    continue
                logger.exception("it cannot be closed", extra={"run": run_id})
            self.engine.release(handle)
            del self.running[run_id, attempt]
            self.stopped.discard((run_id, attempt))
            self.may_have_work = True

    def _close_lost(self, node: RunNode) -> bool:
        """Close a lost attempt, whatever is left of it. Raises StaleAttempt.

        Returns False if it cannot be closed yet.
        """
        try:
            return self._end_lost(node)
        except Exception as error:
            if isinstance(error, StaleAttempt) or may_pass(error):
                raise
            failure_kind = "code" if isinstance(error, CannotRecord) else "infrastructure"
            reason = str(error) if failure_kind == "code" else in_short(error)
            self._fail(node.run_id, node.attempt, reason, failure_kind=failure_kind)
            return True

    def _end_lost(self, node: RunNode) -> bool:
        """Record the remaining spool and close the attempt.

        Returns False if another node may still be training. For a node other than the first, only
        reports its outcome to the first. Raises StaleAttempt, CannotRecord.
        """
        run_id, attempt = node.run_id, node.attempt
        reason = f"its supervisor died in attempt {attempt}"
        outcome = NodeOutcome(reason, failure_kind="infrastructure")
        if node.node:
            with self.database.writing() as session:  # unless the node reported it itself
                node_groups.record_outcome(session, run_id, attempt, node.node, outcome)
            return True
        recorder = Recorder(self.settings, self.database, self.store, run_id, attempt)

        def renew() -> None:
            with self.database.writing() as session:
                queue.renew(session, run_id, attempt, self.settings.lease_seconds)

        recorder.log.close()
        while not recorder.flush(meanwhile=renew) or recorder.finish():
            pass
        if recorder.problem:
            raise CannotRecord(recorder.problem)
        if node_group.close(self.database, self.settings, run_id, attempt, outcome) is None:
            return False
        with self.database.writing() as session:
            queue.end_killed(
                session,
                run_id,
                attempt,
                reason=reason,
                max_attempts=self.settings.max_attempts,
                max_stalled_attempts=self.settings.max_stalled_attempts,
                log=self._supervisor_log(run_id, attempt),
            )
        logger.warning("%s", reason, extra={"run": run_id})
        return True

    def _supervisor_log(self, run_id: int, attempt: int) -> str:
        path = self.settings.run_folder(run_id) / f"supervisor-{attempt}.log"
        if path.is_symlink() or not path.exists():  # a link made by the run can point anywhere
            return "it left no log"
        return path.read_text(errors="replace")[-8000:]

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
        self.may_have_work |= has_room or pending.nodes != len(self.running)
        if pending.is_stopped:
            self._preempt()

    def _preempt(self) -> None:
        """Request once that each training save a checkpoint and be requeued."""
        for attempt, (handle, _node) in self.running.items():
            if attempt not in self.stopped:
                self.engine.signal(handle, signal.SIGTERM)
                self.stopped.add(attempt)

    def _stop_runs(self) -> None:
        """Checkpoint and requeue all trainings; kill them after stop_grace_seconds."""
        for handle, _node in self.running.values():
            self.engine.signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + self.settings.stop_grace_seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(0.1)
            self._reap()
        for handle, _node in self.running.values():
            self.engine.signal(handle, signal.SIGKILL)
        while any(self.engine.is_alive(handle) for handle, _node in self.running.values()):
            time.sleep(0.1)
        self._reap()  # the next worker of this name finds those waiting for a bucket


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
