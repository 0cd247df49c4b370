"""A server, and a run that a separate process spools and records, like a worker."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx2
import numpy as np
import psutil

from benchmarks import synthetic
from db.access import accounts
from db.database import Database, open_database
from db.files.object_store import open_store
from db.queue import queue
from db.runs import runs
from db.settings import Settings
from halfstep.telemetry.spool import STEP_DTYPE, SpoolWriter
from worker.attempts.recorder import Recorder

DRAIN_SECONDS = 0.3  # halfstep.recording.ring's, which would load torch
FLUSH_SECONDS = 0.05  # the supervisor's


@dataclass(frozen=True)
class Site:
    """A running server with run 1, which is recorded up to `steps` and in training."""

    settings: Settings
    database: Database
    address: str
    server: psutil.Process
    steps: int

    def link(self) -> str:
        """Return a URL that signs a browser in."""
        with self.database.writing() as session:
            user = accounts.user_named(session, "bench")
            return f"{self.address}/?token={accounts.make_link_token(session, user)}"

    def token(self, name: str = "bench") -> str:
        """Return a token for a user's scripts."""
        with self.database.writing() as session:
            user = accounts.user_named(session, name)
            return accounts.make_api_token(session, user, "bench")[0]

    @contextmanager
    def feeding(self, steps_a_second: int) -> Iterator[None]:
        """Train and record run 1 in two processes, like a training and its supervisor.

        elapsed_ms of a step is the moment of its end, in milliseconds since the epoch.
        """
        context = multiprocessing.get_context("spawn")
        processes: list[BaseProcess] = [
            context.Process(target=_train, args=(self.settings, self.steps, steps_a_second)),
            context.Process(target=_record, args=(self.settings,)),
        ]
        for process in processes:
            process.start()
        try:
            yield
        finally:
            for process in processes:
                process.terminate()
                process.join()


@contextmanager
def serving(steps: int) -> Iterator[Site]:
    """Start a server on a fresh SQLite database, with a run of some steps in training."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        database.migrate()
        run_id = synthetic.start_run(database)
        for flush in synthetic.flushes(steps):
            synthetic.record(database, run_id, flush)
        with database.writing() as session:
            queue.seconds_since_start(session, runs.get(session, run_id))
            queue.start(session, run_id, 1)
        with serving_from(database, folder, steps) as site:
            yield site


@contextmanager
def serving_from(database: Database, folder: str, steps: int) -> Iterator[Site]:
    """Start a server with a database and a data folder."""
    port = free_port()
    url = database.engine.url.render_as_string(hide_password=False)
    settings = Settings(data=Path(folder), port=port, database_url=url)
    environment = {
        "HALFSTEP_DATA": folder,
        "HALFSTEP_PORT": str(port),
        "HALFSTEP_DATABASE_URL": url,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep.cli.main", "server"],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(address):
            time.sleep(0.1)
        yield Site(settings, database, address, psutil.Process(process.pid), steps)
    finally:
        process.terminate()
        process.wait()
        database.dispose()


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(address: str) -> bool:
    try:
        return bool(httpx2.get(f"{address}/healthz").status_code == 200)
    except httpx2.TransportError:
        return False


def _train(settings: Settings, step: int, steps_a_second: int) -> None:
    """Spool steps at a steady rate, delivered as often as by trainer.telemetry."""
    rng = np.random.default_rng(1)
    while not settings.scratch_folder(1).exists():  # the recorder creates it
        time.sleep(FLUSH_SECONDS)
    spool = SpoolWriter(settings.scratch_folder(1) / "spool", 1)
    begun, made = time.time(), 0
    while True:
        time.sleep(DRAIN_SECONDS)
        due = int((time.time() - begun) * steps_a_second)
        count = due - made
        steps = np.zeros(count, STEP_DTYPE)
        steps["step"] = step + 1 + made + np.arange(count)
        steps["elapsed_ms"] = (begun + (made + 1 + np.arange(count)) / steps_a_second) * 1000
        steps["step_us"] = 1e6 / steps_a_second
        steps["loss"] = 0.3 + rng.lognormal(-2, 0.5, count)
        steps["scale"], steps["lr"] = 65536.0, 1e-4
        steps["grad_norm"] = rng.lognormal(-1.5, 0.4, count)
        steps["grad_norm_clipped"] = np.minimum(steps["grad_norm"], 1.0)
        spool.steps(steps)
        made = due


def _record(settings: Settings) -> None:
    database = open_database(settings)
    recorder = Recorder(settings, database, open_store(settings), 1, 1)
    while True:
        if recorder.flush():
            time.sleep(FLUSH_SECONDS)
