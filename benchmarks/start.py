"""Time from the submission of a run to its first recorded step, warm, cold, and with a bare script.

A worker on SQLite trains one run of `digits` after another; each is submitted after the last has
ended. The script is the same loop, written by hand, in a new interpreter; its time is from the
interpreter's start to the end of the first step. The benchmark also measures the time from the
start of a worker, or of `halfstep up`, to the offer of its recipes.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Select, select

from benchmarks.report import report
from benchmarks.site import free_port
from db.access import accounts
from db.database import Database, open_database
from db.queue import workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, StepBlock, User

RUNS, POLL_SECONDS, TICK_SECONDS = 20, 0.005, 0.5
BAR_P50, BAR_P95, BAR_OFFER = 0.5, 1.0, 4.0
CONFIG = {"precision": "fp16", "training": {"steps": 60}}
#: The loop of trainer.recipes.digits in fp16 with a GradScaler.
SCRIPT = """
import numpy as np, torch
from importlib.util import find_spec
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
file = find_spec("sklearn").submodule_search_locations[0] + "/datasets/data/digits.csv.gz"
table = torch.from_numpy(np.loadtxt(file, delimiter=","))
pixels, labels = table[:, :-1].float() / 16, table[:, -1].long()
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    rows = torch.randint(len(pixels), (64,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if not step:
        print("stepped", flush=True)
"""


def main() -> None:
    """Measure all three, and compare warm starts with the bars."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        settings = Settings(data=Path(folder))
        database = open_database(settings)
        database.migrate()
        with database.writing() as session:
            owner = accounts.user_named(session, "bench")
        warm, offered_warm = _starts(settings, database, owner, "yes")
        cold, offered_cold = _starts(settings, database, owner, "no")
        with _service(settings, "up", "yes"):
            offered_up = _seconds_to_offer(database)
        database.dispose()
    bare = sorted(_bare() for _ in range(RUNS))
    p50, p95 = _at(warm, 50), _at(warm, 95)
    measured = f"p50 {p50:.2f} s, p95 {p95:.2f} s, offers {offered_up:.1f} s"
    report(
        "start",
        f"p50 ≤ {BAR_P50} s, p95 ≤ {BAR_P95} s from submission to the first recorded step; "
        f"`halfstep up` offers recipes after ≤ {BAR_OFFER} s",
        ("start", "runs", "s, p50", "s, p95", "s, longest", "worker offers after, s"),
        [
            ("`halfstep up`", "–", "–", "–", "–", f"{offered_up:.1f}"),
            _row("warm", warm, f"{offered_warm:.1f}"),
            _row("cold (HALFSTEP_WARM_START=no)", cold, f"{offered_cold:.1f}"),
            _row("bare script", bare, "–"),
        ],
        measured=measured,
        passed=p50 <= BAR_P50 and p95 <= BAR_P95 and offered_up <= BAR_OFFER,
        peer=f"bare script, p50 {_at(bare, 50):.2f} s",
    )


def _starts(
    settings: Settings, database: Database, owner: User, warm: str
) -> tuple[list[float], float]:
    """Return the sorted seconds to each run's first step, and to the worker's offer."""
    with _service(settings, "worker", warm):
        offered = _seconds_to_offer(database)
        seconds = [_start(database, owner) for _ in range(RUNS + 1)]
    return sorted(seconds[1:]), offered  # the first shares its time with the worker's own start


@contextmanager
def _service(settings: Settings, command: str, warm: str) -> Iterator[None]:
    environment = {
        "HALFSTEP_PORT": str(free_port()),
        "HALFSTEP_DATA": str(settings.data),
        "HALFSTEP_WARM_START": warm,
        "HALFSTEP_LOG_LEVEL": "error",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "halfstep.cli.main", command],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _seconds_to_offer(database: Database) -> float:
    """Return the seconds until a newly started service offers recipes."""
    begun = time.perf_counter()
    _await(lambda: _offers(database))
    return time.perf_counter() - begun


def _start(database: Database, owner: User) -> float:
    """Submit a run and wait for its end; return the seconds to its first step."""
    begun = time.perf_counter()
    with database.writing() as session:
        run_id = runs.submit(session, owner, Run(recipe="digits", config=CONFIG)).id
    _await(lambda: _has(database, select(StepBlock.first).where(StepBlock.run_id == run_id)))
    seconds = time.perf_counter() - begun
    unfinished = select(Run.id).where(Run.id == run_id, Run.ended_at.is_(None))
    _await(lambda: not _has(database, unfinished))
    # The next one is submitted at another moment of the worker's tick.
    time.sleep(TICK_SECONDS * (1 + run_id % 7 / 7))
    return seconds


def _has(database: Database, query: Select[int]) -> bool:
    with database.read_only() as session:
        return session.scalar(query.limit(1)) is not None


def _offers(database: Database) -> bool:
    with database.read_only() as session:
        alive = [each for each, is_alive in workers.all_workers(session) if is_alive]
        return any(each.recipes for each in alive)


def _await(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(POLL_SECONDS)


def _bare() -> float:
    """Return the seconds from the script's start to its first step."""
    begun = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return time.perf_counter() - begun


def _at(seconds: list[float], percent: int) -> float:
    return seconds[min(len(seconds) - 1, len(seconds) * percent // 100)]


def _row(name: str, seconds: list[float], offered: str) -> tuple[object, ...]:
    p50, p95 = _at(seconds, 50), _at(seconds, 95)
    return name, len(seconds), f"{p50:.2f}", f"{p95:.2f}", f"{seconds[-1]:.2f}", offered


if __name__ == "__main__":
    main()
