"""A synthetic long run: plausible steps, written through db.telemetry.telemetry.

5 ms a step, a cosine learning rate, a noisy loss with rare spikes, and every 500th step skipped, so
that 10,000,000 steps have 20,000 skips, as many back-offs and as many growths.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from alembic.script import ScriptDirectory
from numpy.typing import NDArray

from db.access import accounts
from db.database import Database
from db.queue import claims, workers
from db.runs import runs
from db.tables import Run
from db.telemetry import telemetry
from halfstep.telemetry.events import Culprit, Scaler, StepEvent
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import STEP_DTYPE

BATCH_STEPS = 5000
SKIP_EVERY = 500
LONG_STEPS = 10_000_000


def start_run(database: Database) -> int:
    """Submit a run and claim it for recording."""
    with database.writing() as session:
        config = {"precision": "fp16", "training": {"steps": LONG_STEPS}}
        owner = accounts.user_named(session, "bench")
        queued = runs.submit(session, owner, Run(recipe="synthetic", config=config))
        device = {"kind": "cpu", "index": 0, "memory_bytes": 2**30, "fp16": True, "bf16": True}
        offer: dict[str, Any] = {"devices": [device], "recipes": [], "versions": {}}
        worker = workers.register(session, name=f"w{queued.id}", host="here", pid=1, **offer)
        run = claims.claim(
            session,
            worker.id,
            recipes=["synthetic"],
            precisions=["fp16"],
            free_devices=[0],
            lease_seconds=1e6,
        )
        assert run is not None
        return run.id


def flushes(steps: int, batch: int = BATCH_STEPS, *, first: int = 1) -> Iterator[telemetry.Flush]:
    """Return a run's steps from `first` on with events, in batches that are always the same."""
    rng = np.random.default_rng(0)
    for start in range(first, steps + 1, batch):
        numbers = np.arange(start, min(start + batch, steps + 1))
        made = make_steps(numbers, rng)
        events: list[StepEvent] = [
            event for step in made["step"][made["flags"] > 0] for event in _skip(int(step))
        ]
        yield telemetry.Flush(steps=[made], events=events)


def record(database: Database, run_id: int, flush: telemetry.Flush) -> None:
    """Record a flush in one transaction, as a supervisor does."""
    with database.writing() as session:
        telemetry.record(session, run_id, 1, flush)


def make_steps(numbers: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return records of STEP_DTYPE for these steps."""
    made = np.zeros(len(numbers), STEP_DTYPE)
    made["step"], made["elapsed_ms"] = numbers, numbers * 5
    made["step_us"] = 4800 + rng.integers(0, 400, len(numbers))
    made["data_us"] = rng.integers(20, 100, len(numbers))
    made["loss"] = 2 * np.exp(-numbers / LONG_STEPS * 3) + rng.lognormal(-2, 0.5, len(numbers))
    made["scale"] = 65536.0 / (1 + (numbers - 1) // (SKIP_EVERY // 2) % 2)
    made["grad_norm"] = rng.lognormal(-1.5, 0.4, len(numbers))
    made["grad_norm_clipped"] = np.minimum(made["grad_norm"], 1.0)
    made["lr"] = 3e-4 * (1 + np.cos(np.pi * numbers / LONG_STEPS)) / 2
    skipped = numbers % SKIP_EVERY == 0
    made["flags"][skipped] = SKIPPED
    made["grad_norm"][skipped] = np.inf
    made["grad_norm_clipped"][skipped] = np.nan
    return made


def _skip(step: int) -> Iterator[Scaler]:
    """Return the events of a skipped step, and of the growth half-way to it."""
    low, high = 32768.0, 65536.0
    grown = step - SKIP_EVERY // 2
    yield Scaler(kind="growth", step=grown, optimizer=None, scale_before=low, scale_after=high)
    yield Scaler(
        kind="skip",
        step=step,
        optimizer="AdamW",
        scale_before=high,
        scale_after=low,
        culprits=[Culprit(name="blocks.3.mlp.weight")],
    )
    yield Scaler(kind="backoff", step=step, optimizer=None, scale_before=high, scale_after=low)


def long_run() -> Database:
    """Return a SQLite database with a run 1 of 10,000,000 steps and a run 2 of 10,000.

    It takes a minute to make, so it is kept in the temporary folder for the next benchmark.
    """
    return _open("long", (LONG_STEPS, 10_000))


def many_runs(count: int, steps: int) -> Database:
    """Return a SQLite database, also kept, with this many runs of this many steps."""
    return _open(f"{count}-runs", (steps,) * count)


def _open(kind: str, lengths: Sequence[int]) -> Database:
    """Return a database with runs of these lengths, which is created if missing."""
    scripts = ScriptDirectory.from_config(Database("sqlite:///unused.db").migrations())
    # Of an earlier schema there may be one too.
    name = f"halfstep-bench-{kind}-{scripts.get_current_head()}.db"
    path = Path(tempfile.gettempdir()) / name
    database = Database(f"sqlite:///{path}")
    if not path.exists():
        making = path.with_suffix(".making")
        making.unlink(missing_ok=True)
        unfinished = Database(f"sqlite:///{making}")
        unfinished.migrate()
        for steps in lengths:
            run_id = start_run(unfinished)
            for flush in flushes(steps):
                record(unfinished, run_id, flush)
        unfinished.dispose()
        making.rename(path)
    return database
