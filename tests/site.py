"""A data folder, its database and real workers, for tests of the whole system."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from db.database import Database
from db.errors import DatabaseUnreachable
from db.queue import queue, workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from db.telemetry import series, step_blocks
from halfstep.cli.main import main
from tests import warm
from tests.db.conftest import CPU, DIGITS, add_worker, claim
from worker.daemon import Worker
from worker.engine import Handle

GATED, GATED_MLP = (
    f"{Path(__file__).with_name('gated.py')}:{name}" for name in ("Gated", "GatedMLP")
)
#: A supervisor that has ended.
DEAD = Handle(pid=0, started_ticks=1, boot_id="")
SECONDS = 240  # patience with a slow machine; nothing here is asserted about time


class Site:
    """A data folder, its database and its workers."""

    def __init__(self, data: Path, database: Database, url: str, owner: User) -> None:
        self.data, self.database, self.url, self.owner = data, database, url, owner

    def submit(self, steps: int = 60, **changes: Any) -> int:
        """Queue a run of digits, or with these changes; return its id."""
        config = {"precision": "fp16", "training": {"steps": steps}}
        values: dict[str, Any] = {"recipe": "digits", "config": config}
        with self.database.writing() as session:
            return runs.submit(session, self.owner, Run(**(values | changes))).id

    @property
    def environment(self) -> dict[str, str]:
        result = {
            "HALFSTEP_RUN_ENVIRONMENT": "HALFSTEP_GATE, HALFSTEP_TEST_*, HALFSTEP_COLD, LD_PRELOAD"
        }
        return {"HALFSTEP_DATA": str(self.data), "HALFSTEP_DATABASE_URL": self.url, **result}

    @contextmanager
    def worker(self, name: str = "w1", **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**self.environment, "HALFSTEP_WORKER_NAME": name, **environment}
        command = [sys.executable, "-m", "worker.worker"]
        process = warm.Popen(command, env={**os.environ, **environment})
        try:
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)

    def start_gated_worker(
        self, name: str = "w1", **environment: str
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Start a worker with GATED and GATED_MLP, which are slow until the gate is open."""
        gated = {"HALFSTEP_RECIPES": f"{GATED}, {GATED_MLP}", "HALFSTEP_GATE": str(self.gate)}
        return self.worker(name, **gated, **environment)

    def open_gate(self) -> None:
        self.gate.touch()

    @property
    def gate(self) -> Path:
        return self.data / "gate"

    def scratch(self, run_id: int) -> Path:
        """Return the folder that a run may write."""
        return self.data / "scratch" / str(run_id) / "0"

    def idle_worker(self) -> Worker:
        """Return a worker in this process with one CPU, which acts only when called."""
        worker = Worker(Settings(data=self.data, database_url=self.url), self.database)
        worker.device_indexes = {0}
        worker.recipes, worker.precisions = ["digits"], ["fp16"]
        worker.device_memory_bytes = 2.0**33
        row = add_worker(self.database, "idle", [DIGITS], [CPU])
        worker.id = row.id
        return worker

    def lost_attempt(self, worker: Worker, run_id: int) -> tuple[int, int]:
        """Claim a run whose supervisor died at once, unnoticed by the worker."""
        with self.database.writing() as session:
            run = claim(session, worker)
            assert run is not None
            assert run.id == run_id
            node = queue.node(session, run.id, run.attempt)
        worker.running.nodes[run.id, run.attempt] = (DEAD, node)
        return run.id, run.attempt

    def reaches_database(self) -> bool:
        try:
            self.database.check()
        except DatabaseUnreachable:
            return False
        return True

    def offers(self, recipe: str) -> bool:
        with self.database.reading() as session:
            return workers.named(workers.recipes(session), recipe) is not None

    def recipes(self) -> list[dict[str, Any]]:
        """Return the recipes of the workers, including broken ones."""
        with self.database.reading() as session:
            return [each for worker, _ in workers.all_workers(session) for each in worker.recipes]

    def run(self, run_id: int) -> Run:
        with self.database.reading() as session:
            return runs.get(session, run_id)

    def wait(self, run_id: int, *statuses: Status) -> Run:
        wanted = statuses or (Status.FINISHED, Status.FAILED, Status.CANCELLED)
        until(lambda: self.run(run_id).status in wanted)
        return self.run(run_id)

    def wait_for_step(self, run_id: int, step: int) -> None:
        until(lambda: self.run(run_id).step >= step)

    def count_steps(self, run_id: int) -> int:
        with self.database.reading() as session:
            return step_blocks.count(session.connection(), run_id)

    def history(self, run_id: int) -> list[str]:
        with self.database.reading() as session:
            return [row.status for row in runs.statuses(session, run_id)]

    def log(self, run_id: int) -> str:
        with self.database.reading() as session:
            return "\n".join(line.text for line in series.log_lines(session, run_id))

    def training(self, run_id: int) -> psutil.Process:
        """Return a run's training process, started by its supervisor or forked."""
        with self.database.reading() as session:
            attempt = runs.get(session, run_id).attempt
        log = (self.data / "runs" / str(run_id) / f"supervisor-{attempt}.log").read_text()
        [pid] = re.findall(r"process (\d+)$", log, re.MULTILINE)
        return psutil.Process(int(pid))

    def has_training(self, run_id: int) -> bool:
        try:
            return is_running(self.training(run_id))
        except (psutil.NoSuchProcess, FileNotFoundError, IndexError, ValueError):
            return False

    def supervisor_pid(self, run_id: int, attempt: int = 1) -> int:
        handle = self.data / "runs" / str(run_id) / f"supervisor-{attempt}.json"
        return int(json.loads(handle.read_text())["pid"])


def halfstep(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "halfstep.cli.main", *words]
    return warm.run(command, env={**os.environ, **environment}, timeout=SECONDS)


def type_command(*words: str) -> int | str:
    """Run a command in this process; return its exit code or its last message."""
    try:
        main(list(words))
    except SystemExit as ended:
        return ended.code or 0
    return 0


def type_train(words: list[str]) -> None:
    """Run `halfstep recipe train` in this process; raise SystemExit as it does."""
    main(["recipe", "train", *words])


@contextmanager
def heed(number: signal.Signals) -> Iterator[None]:
    """Let a signal end started processes, although this one ignores it, as behind nohup or &."""
    is_ignored = signal.getsignal(number) is signal.SIG_IGN
    if is_ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def up(
    stop: signal.Signals = signal.SIGINT,
    python: str | Path = sys.executable,
    **environment: str,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `halfstep up`; yield it with its printed link.

    stop: the signal that ends it.  python: interpreter of the environment in which it is installed.
    """
    with heed(stop):
        process = warm.Popen(
            [str(python), "-m", "halfstep.cli.main", "up"],
            env={
                **os.environ,
                "HALFSTEP_PORT": str(free_port()),
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if link := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError("it printed no link")
        yield process, link.group()
    finally:
        process.send_signal(stop)
        try:
            process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                member.kill()
            process.communicate()
            raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(base: str) -> bool:
    try:
        return bool(httpx2.get(f"{base}/healthz").status_code == 200)
    except httpx2.TransportError:
        return False


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for a condition that other processes fulfil, without using much CPU time."""
    begun = time.monotonic()
    deadline = begun + seconds
    while not condition():
        now = time.monotonic()
        assert now < deadline, "it did not happen"
        time.sleep(min(max(0.05, 4 * (now - begun)), 0.5))
        begun = time.monotonic()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
