"""One attempt of one run, from claim to end: starts the training, records what it tells, obeys.

    python -m trainer.supervisor RUN ATTEMPT        (the worker's engine calls this)

The training knows no database: it appends to its spool and reads its control file. This process
has the database but no torch. While the database is away the spool simply grows.
"""

import json
import signal
import sys
import threading
import time
from typing import Any

import obstore
from obstore.store import ObjectStore

from db import checkpoints, queue, series, telemetry, workers
from db.database import Database, is_outage
from db.errors import Fenced
from db.settings import Settings
from db.storage import get_file, open_store, put_file
from db.tables import Checkpoint, Status
from trainer.child import Child
from trainer.samples import Sampler
from trainer.spool import SpoolReader

TICK_SECONDS = (
    0.1  # how often spool and log are recorded: a step is on the page within half a second
)
RENEWAL_SECONDS = 0.4  # how often the lease is renewed and wishes are read
SAMPLE_SECONDS = 2.0
#: Of the lease, the share after which a training whose lease could not be renewed is ended.
GIVE_UP_SHARE = 0.7

#: What a training said of its end, and what becomes of the run.
OUTCOMES = {
    "finished": Status.FINISHED,
    "failed": Status.FAILED,
    "cancelled": Status.CANCELLED,
    "paused": Status.PAUSED,
    "preempted": Status.QUEUED,
}


class Supervisor:
    """The state of one attempt. `run` is its whole life."""

    def __init__(self, settings: Settings, database: Database, run_id: int, attempt: int) -> None:
        self.settings = settings
        self.database = database
        self.run_id = run_id
        self.attempt = attempt
        self.folder = settings.run_folder(run_id)
        self.store: ObjectStore = open_store(settings)
        self.control: dict[str, Any] = {"stop": None, "checkpoint": None}
        self.pending = telemetry.Flush()
        self.saved: list[dict[str, Any]] = []  # checkpoint events to publish with what is pending
        self.started = False
        self.sample_due = 0.0
        self.gave_up = False
        self.preempted = threading.Event()
        self.renewed_at = time.monotonic()
        self.training_ended = threading.Event()

    def run(self) -> None:
        """Start the training, record it until it ends, and close the attempt."""
        self._prepare()
        child = Child(self.folder, self.attempt, len(self.devices), self._environment())
        watchdog = threading.Thread(target=self._watch, args=(child,), daemon=True)
        watchdog.start()
        try:
            self._follow(child)
        except Fenced:
            return
        finally:
            child.kill()
            self.training_ended.set()

    def preempt(self, *_signal: Any) -> None:
        """Ask the training to leave a checkpoint and let the run go back to the queue."""
        self.preempted.set()

    def _prepare(self) -> None:
        """Write the job that the training reads. Raises Fenced."""
        with self.database.writing() as session:
            run = queue.held(session, self.run_id, self.attempt)
            self.started_at = queue.set_started_at(session, run)
            node = queue.node(session, self.run_id, self.attempt)
            self.devices = node.devices
            self.is_cuda = workers.get(session, node.worker_id).devices[0]["kind"] == "cuda"
            lines = series.log_lines(session, self.run_id, most=1)
            self.log_number = lines[-1].number if lines else 0
            states = checkpoints.to_resume(session, self.run_id)
        resume = next(filter(None, map(self._fetch, states)), None)
        job = {
            "run": self.run_id,
            "attempt": self.attempt,
            "recipe": run.recipe,
            "config": run.config,
            "started_at": self.started_at,
            "resume": resume,
            "device": "cuda" if self.is_cuda else "cpu",
        }
        self._write(f"job-{self.attempt}.json", job)
        self._write(f"control-{self.attempt}.json", self.control)
        self.sampler = Sampler(self.devices, cuda=self.is_cuda)
        self.spool = SpoolReader(self.folder / "spool")

    def _fetch(self, state: Checkpoint) -> str | None:
        """Return where a whole checkpoint lies in the run's folder, or say what it lacks."""
        path = self.settings.data / state.key
        try:
            get_file(self.store, state.key, path, sha256=state.sha256)
        except (FileNotFoundError, ValueError) as error:
            self._remark(f"{error}; trying the checkpoint before it")
            return None
        return str(path.relative_to(self.folder))

    def _environment(self) -> dict[str, str]:
        if not self.is_cuda:
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))}

    def _follow(self, child: Child) -> None:
        """Record until the training has ended and all that it said is in the database."""
        renewal_due = 0.0
        pause = TICK_SECONDS
        while True:
            code = child.exit_code()
            if code is not None:
                child.finish_listening()
            try:
                if code is None and time.monotonic() >= renewal_due:
                    self._renew()
                    renewal_due = time.monotonic() + RENEWAL_SECONDS
                is_drained = self._flush(child)
                if code is not None and is_drained:
                    self._end(code)
                    return
                pause = TICK_SECONDS
            except Exception as error:
                # Away is the database or the store: what is pending waits, the spool keeps what
                # comes, and the watchdog counts.
                if not (is_outage(error) or isinstance(error, obstore.exceptions.BaseError)):
                    raise
                print(f"waiting: {error}", file=sys.stderr, flush=True)  # noqa: T201 - our own log
                pause = min(pause * 2, 5.0)
            time.sleep(pause)

    def _renew(self) -> None:
        """Renew the lease, and pass on what people want."""
        before = time.monotonic()  # the lease counts from before it was asked for, to be safe
        with self.database.writing() as session:
            wishes = queue.renew(session, self.run_id, self.attempt, self.settings.lease_seconds)
        self.renewed_at = before
        stop = {"run": None, "pause": "pause", "cancel": "cancel"}[wishes.wanted]
        if self.preempted.is_set():
            stop = stop or "preempt"
        self._command({"stop": stop, "checkpoint": wishes.checkpoint_request})

    def _flush(self, child: Child) -> bool:
        """Record what the training told since the last time; tell whether that was nothing."""
        if not self.pending and not self.saved:
            self._collect(child)
        if not self.pending and not self.saved:
            return True
        keys = [self._store(event) for event in self.saved]
        with self.database.writing() as session:
            if not self.started and self.pending.steps:
                queue.start(session, self.run_id, self.attempt)
            telemetry.record(session, self.run_id, self.attempt, self.pending)
            for event, of_event in zip(self.saved, keys, strict=True):
                checkpoints.publish(session, self.run_id, self.attempt, event, of_event)
        self.started = self.started or bool(self.pending.steps)
        self.pending, self.saved = telemetry.Flush(), []
        self.spool.release(delete=True)
        return False

    def _collect(self, child: Child) -> None:
        """Take what is new from the spool and the log. Only called when nothing is pending."""
        for item in self.spool.poll():
            if not isinstance(item, dict):
                self.pending.steps.append(item)
            elif item["event"] == "checkpoint":
                self.saved.append(item)
            else:
                self.pending.events.append(item)
                if item["event"] == "resumed":
                    self._remark(_resumed(item))
        for line in child.take_lines():
            self._log(line)
        if time.monotonic() >= self.sample_due:
            self.sample_due = time.monotonic() + SAMPLE_SECONDS
            elapsed_ms = round((time.time() - self.started_at) * 1000)
            samples = self.sampler.take()
            self.pending.samples += [{"elapsed_ms": elapsed_ms, **sample} for sample in samples]

    def _store(self, event: dict[str, Any]) -> list[str]:
        """Put a checkpoint's files into the store and return their keys."""
        keys = []
        for file in event["files"]:
            path = self.folder / file["path"]
            key = path.relative_to(self.settings.data).as_posix()
            put_file(self.store, key, path)
            keys.append(key)
        return keys

    def _end(self, exit_code: int) -> None:
        """Close the attempt by what the training left behind as its outcome, or by how it died."""
        outcome = self._outcome(exit_code)
        status = OUTCOMES[outcome["status"]]
        with self.database.writing() as session:
            queue.end(
                session,
                self.run_id,
                self.attempt,
                status,
                reason=outcome.get("reason"),
                error=outcome["error"],
                fault=outcome.get("fault"),
            )

    def _outcome(self, exit_code: int) -> dict[str, Any]:
        path = self.folder / f"outcome-{self.attempt}.json"
        if path.exists():
            outcome: dict[str, Any] = json.loads(path.read_text())
            if outcome["status"] == "failed":
                return {**outcome, "fault": "code", "reason": outcome["error"].splitlines()[-1]}
            if outcome["status"] == "preempted":
                return {**outcome, "fault": "infrastructure", "reason": "its worker was stopped"}
            return outcome
        reason = "its lease could not be renewed" if self.gave_up else _death(exit_code)
        if self.preempted.is_set() or self.attempt < self.settings.max_attempts:
            status, error = "preempted", None
        else:
            error = f"{reason}; this was attempt {self.attempt} of {self.settings.max_attempts}"
            status = "failed"
        return {"status": status, "error": error, "reason": reason, "fault": "infrastructure"}

    def _command(self, control: dict[str, Any]) -> None:
        if control != self.control:
            self.control = control
            self._write(f"control-{self.attempt}.json", control)

    def _watch(self, child: Child) -> None:
        """End a training whose lease cannot be renewed, in time before somebody else starts it."""
        limit = GIVE_UP_SHARE * self.settings.lease_seconds
        while not self.training_ended.wait(min(1.0, limit / 10)):
            silence = time.monotonic() - self.renewed_at
            if silence > limit and child.exit_code() is None:
                self.gave_up = True
                child.kill()

    def _remark(self, text: str) -> None:
        self._log({"time": time.time(), "stream": "halfstep", "text": text})

    def _log(self, line: dict[str, Any]) -> None:
        self.log_number += 1
        self.pending.log_lines.append({"number": self.log_number, "attempt": self.attempt, **line})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a file so that a reader sees the old one or the new one, never a part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)


def _resumed(event: dict[str, Any]) -> str:
    how = "exactly" if event["exact"] else f"not bit-exactly: {'; '.join(event['notes'])}"
    return f"resumed at step {event['step']}, {how}"


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"the training process was killed by {signal.Signals(-exit_code).name}"
    return f"the training process ended with exit code {exit_code} and left no outcome"


def main() -> None:
    """Run the attempt that the command line names."""
    run_id, attempt = map(int, sys.argv[1:])
    settings = Settings()
    database = Database(settings.database_url)
    supervisor = Supervisor(settings, database, run_id, attempt)
    signal.signal(signal.SIGTERM, supervisor.preempt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.run()


if __name__ == "__main__":
    main()
