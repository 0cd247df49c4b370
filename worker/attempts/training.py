"""Work of an attempt whose run has a recipe: Halfstep's training process."""

import errno
import logging
import os
import sys
from functools import partial
from typing import cast

from sqlalchemy.orm import Session

from db.files import checkpoints
from db.files.object_store import get_file
from db.queue import node_groups, queue
from db.tables import TRAIN, CheckpointFile, Status
from halfstep import data_paths
from halfstep.fork_server import ForkFailed
from halfstep.telemetry.attempt_messages import (
    MOST_OF_RUN,
    ControlRequest,
    ControlState,
    RequestKind,
    Stop,
    TrainingJob,
    TrainingOutcome,
    read_message,
    write_message,
)
from halfstep.telemetry.source_state import SourceState, read_state
from worker import gpus
from worker.attempts import node_group
from worker.attempts.attempt import LOST_LEASE, Attempt, CannotStart, Outcome, death, disk_full
from worker.attempts.child import Child
from worker.attempts.environment import Started
from worker.attempts.initial_weights import bring_weights
from worker.attempts.renew_lease import wait_for
from worker.sandbox import run_environment
from worker.warm_start import differs_early

logger = logging.getLogger(__name__)

STOPPED = "its worker was stopped"
#: Outcome reported by a training, and the resulting status of the run.
OUTCOMES = {
    "finished": Status.FINISHED,
    "failed": Status.FAILED,
    "cancelled": Status.CANCELLED,
    "paused": Status.PAUSED,
    "preempted": Status.QUEUED,
}


STOPS: dict[str, Stop | None] = {
    "run": None,
    "preempt": "preempt",
    "pause": "pause",
    "cancel": "cancel",
}


class Training:
    """Training process, which reads a job and a control file and writes its outcome."""

    def __init__(self, attempt: Attempt, session: Session) -> None:
        self._attempt = attempt
        self.measures = attempt.run.task != TRAIN  # instead of training
        self._measured = checkpoints.to_measure(session, attempt.run) if self.measures else {}
        self._states = [] if self.measures else checkpoints.to_resume(session, attempt.run)
        states = [*self._states, *filter(None, self._measured.values())]
        self._shards = checkpoints.shards_of(session, states)
        self._weights = checkpoints.to_start_from(session, attempt.run.settings)
        self._control = ControlState()
        self._desired_state = "run"

    def prepare(self) -> None:
        """Fetch the checkpoint and write the job file. Raises CannotStart."""
        attempt, run = self._attempt, self._attempt.run
        resume = next(filter(None, map(self._fetch, self._states)), None)
        measured = {f"step {step}": self._fetch_required(step) for step in self._measured}
        if run.parent_id is not None and resume is None and not self.measures:
            text = f"the checkpoint of run {run.parent_id} at step {run.parent_step} that it was to"
            raise CannotStart(f"{text} start from is missing or damaged")
        weights = bring_weights(attempt, self._weights) if resume is None else {}
        resume = attempt.stage(resume) if resume else None
        weights = {module: attempt.stage(path) for module, path in weights.items()}
        host, timeout_seconds = self._rendezvous()
        job = TrainingJob(
            run=run.id,
            attempt=run.attempt,
            recipe=attempt.recipe,
            config=run.config,
            started_at=attempt.started_at,
            seconds_before=attempt.seconds_before,
            resume=resume,
            weights=weights,
            checkpoints=measured,
            device="cuda" if attempt.is_cuda else "cpu",
            host=host,
            timeout_seconds=timeout_seconds,
        )
        file = attempt.recipe_file
        # The shards of a sharded state are in a folder next to it.
        files = [*([resume] if resume else []), *measured.values()]
        states = [name for path in files for name in (path, path.removesuffix(".pt"))]
        self._read = [*states, *weights.values(), *([str(file)] if file else [])]
        write_message(attempt.files.job, job)
        write_message(attempt.files.control, self._control)

    def _fetch_required(self, step: int) -> str:
        """Return the path where the run can read a checkpoint to measure. Raises CannotStart."""
        state = self._measured[step]
        path = self._fetch(state) if state else None
        if path is None:
            parent = self._attempt.run.parent_id
            text = f"the checkpoint of run {parent} at step {step} is missing or damaged"
            raise CannotStart(text, "settings")
        return self._attempt.stage(path)

    def _rendezvous(self) -> tuple[str, float | None]:
        """Return the rendezvous host and the timeout of collective operations."""
        if self._attempt.run.nodes == 1:
            return "localhost", None
        settings = self._attempt.settings
        timeout = settings.rank_timeout_seconds or node_group.TIMEOUT_SHARE * settings.lease_seconds
        return node_group.interface(settings)[1], timeout

    def describe_start(self) -> Started:
        """Return the command to record."""
        file = self._attempt.recipe_file
        if file is None:
            return Started(self._argv(), None, SourceState)
        # A recipe's folder is its operator's, which no run writes.
        return Started(self._argv(), str(file.parent), partial(read_state, file, file.parent))

    def start(self) -> Child:
        """Start the process. Call it from the main thread."""
        attempt = self._attempt
        env = {**gpus.environment(attempt.devices if attempt.is_cuda else [])}
        env |= {"OMP_NUM_THREADS": "1"} | attempt.temporary()
        if attempt.settings.sandbox:
            roots = (attempt.settings.data_roots, str(attempt.files.temporary))
            env[data_paths.ROOTS] = os.pathsep.join(filter(None, roots))
        if attempt.user is not None:  # has no access to the service's cache or recipe list
            env["HALFSTEP_DATA"] = str(attempt.files.temporary)
        if attempt.run.nodes > 1:
            env |= node_group.environment(attempt.settings)
        environment = run_environment.of_recipes(attempt.settings) | env
        isolation = attempt.isolation(self._read, [str(attempt.recipe_file or "")]).variable()
        argv = self._argv()
        if attempt.warm and self._can_be_forked(environment):
            try:
                return Child(argv[2:], environment | isolation, log=attempt.log, warm=attempt.warm)
            except ForkFailed as error:
                logger.warning("the training starts as a program: %s", error)
        return Child(argv, environment | isolation, log=attempt.log)

    def _can_be_forked(self, environment: dict[str, str]) -> bool:
        """Return whether a fork of the warm process is set up as a process of its own would be.

        Ranks are processes of their own, and torch.compile keeps paths that it reads at import.
        """
        run = self._attempt.run
        is_alone = run.nodes == 1 and len(self._attempt.devices) == 1
        is_compiled = bool(run.config.get("training", {}).get("compile"))
        return (
            is_alone and not is_compiled and not differs_early(self._attempt.settings, environment)
        )

    def acknowledge(
        self, requested: queue.DesiredState, child: Child, *, is_preempted: bool
    ) -> None:
        """Write user requests to the control file; end a measurement, which has no steps."""
        self._desired_state = requested.desired_state
        stop = STOPS[self._desired_state]
        if is_preempted:
            stop = stop or "preempt"
        if stop and self.measures:
            child.kill()
        requests = [
            ControlRequest(
                id=request.id, kind=cast("RequestKind", request.kind), value=request.value or 0.0
            )
            for request in requested.requests
        ]
        control = ControlState(stop=stop, requests=requests)
        if control != self._control:
            self._control = control
            write_message(self._attempt.files.control, control)

    def outcome(
        self, exit_code: int, _child: Child, *, is_preempted: bool, has_lost_lease: bool
    ) -> Outcome:
        """Return the outcome that the training wrote, or how it died."""
        outcome = self._read_outcome()
        # If one rank was killed there is an outcome too: the error that the others reported.
        if outcome and not (exit_code < 0 and outcome.status == "failed"):
            return self._as_reported(outcome, is_preempted)
        if self._attempt.node and exit_code == 0:  # the first rank reports the outcome
            return Outcome(Status.FINISHED, STOPPED if is_preempted else None)
        if exit_code == errno.ENOSPC:  # even its outcome could not be written
            return disk_full(self._attempt.control_folder)
        reason = LOST_LEASE if has_lost_lease else death(exit_code, "the training process")
        if is_preempted:
            return Outcome(Status.QUEUED, reason, failure_kind="infrastructure")
        return Outcome(None, reason)

    def _read_outcome(self) -> TrainingOutcome | None:
        """Return the outcome that the training wrote, if any; log one that cannot be read."""
        try:
            return read_message(self._attempt.files.outcome, TrainingOutcome, MOST_OF_RUN)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # a recipe can write anything there
            self._attempt.append_log(f"the outcome of the training is ignored: {error}")
            return None

    def _as_reported(self, outcome: TrainingOutcome, is_preempted: bool) -> Outcome:
        status, error = OUTCOMES[outcome.status], outcome.error or ""
        if status == Status.FAILED and os.strerror(errno.ENOSPC) in error:
            return disk_full(self._attempt.control_folder, error)
        if status == Status.FAILED:
            failure_kind = outcome.failure_kind or "code"
            if failure_kind == node_groups.RANK and self._attempt.run.nodes == 1:
                failure_kind = "code"  # the other rank's error would be known here
            line = 0 if failure_kind == "settings" else -1  # a traceback ends with its exception
            return Outcome(status, (error.splitlines() or [""])[line], error, failure_kind)
        if status == Status.QUEUED and (is_preempted or self._desired_state != "preempt"):
            reason = STOPPED if is_preempted else LOST_LEASE
            return Outcome(status, reason, outcome.error, "infrastructure")
        return Outcome(status, error=outcome.error)

    def _argv(self) -> list[str]:
        files, devices = self._attempt.files, len(self._attempt.devices)
        argv = [sys.executable, "-m", "trainer.process", str(files.folder), str(files.attempt)]
        argv += ["--control-folder", str(files.control_folder)]
        argv += ["--devices", str(devices)] if devices > 1 else []
        nodes, node = self._attempt.run.nodes, self._attempt.node
        return [*argv, *(["--nodes", str(nodes), "--node", str(node)] if nodes > 1 else [])]

    def _fetch(self, state: CheckpointFile) -> str | None:
        """Return the local path of a checkpoint; log the missing file and return None."""
        attempt = self._attempt
        try:
            for row in (*self._shards[state.id], state):
                path = attempt.settings.data / row.key
                fetch = partial(get_file, attempt.store, row.key, path, sha256=row.sha256)
                wait_for(fetch, attempt.renew_lease)
        except (FileNotFoundError, ValueError) as error:
            then = "" if self.measures else "; trying the checkpoint before it"
            attempt.append_log(f"{error}{then}")
            return None
        return str(path)
