"""Frozen steps: bytes a step, and how long charts of ended runs take.

    python -m benchmarks.history [--steps 10000000] [--compared-steps 1000000] [--ended 100]

--ended: runs of 10,000 steps, of which the bytes of 10,000 such runs are estimated.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

from obstore.store import LocalStore, ObjectStore
from sqlalchemy import func, select

from benchmarks import synthetic
from benchmarks.report import report
from db.database import Database
from db.files.step_files import StepFiles
from db.queue import queue
from db.tables import FrozenSteps, Status
from db.telemetry import freeze, windows

COMPARED, WINDOWS, ROUNDS = 20, 300, 15
ENDED_STEPS, ALL_ENDED = 10_000, 10_000
#: In bytes a step, milliseconds, seconds and megabytes.
BARS = {"bytes": 12.0, "open": 50.0, "p99": 50.0, "compare": 0.25, "database": 300.0}


def recorded(database: Database, steps: int) -> int:
    """Record and end a run of so many steps."""
    run_id = synthetic.start_run(database)
    for flush in synthetic.flushes(steps, 50_000):
        synthetic.record(database, run_id, flush)
    with database.writing() as session:
        queue.end(session, run_id, 1, Status.FINISHED)
    return run_id


def frozen(database: Database, store: ObjectStore, run_ids: list[int], folder: Path) -> float:
    """Freeze runs; return the seconds."""
    started = time.perf_counter()
    for run_id in run_ids:
        freeze.freeze(database, store, run_id, folder=folder, stopping=Event())
    return time.perf_counter() - started


def used_bytes(database: Database) -> int:
    """Return the bytes of SQLite's pages with content."""
    with database.engine.connect() as connection:
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


class Times(NamedTuple):
    """Milliseconds of calls and of the processor, each in order; other programs slow the former."""

    wall: list[float]
    processor: list[float]

    def at(self, share: float) -> tuple[float, float]:
        """Return the quantile of both."""
        index = max(0, round(len(self.wall) * share) - 1)
        return self.wall[index], self.processor[index]


def timed(calls: Iterable[Callable[[], object]]) -> Times:
    """Return how long calls take."""
    times = []
    for call in calls:
        started, worked = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - started, time.process_time() - worked))
    return Times(*(sorted(1000 * each for each in column) for column in zip(*times, strict=True)))


def opened(
    database: Database, run_id: int, first: int | None = None, last: int | None = None
) -> None:
    """Read the charts of a run."""
    with database.reading() as session:
        assert windows.window(session, run_id, first=first, last=last) is not None


def compared(database: Database, run_ids: list[int]) -> None:
    """Read the losses of runs, as their comparison does."""
    with database.reading() as session:
        found = windows.windows_of(session, run_ids, most=1000, names={"loss"})
    assert len(found) == len(run_ids)


def random_windows(database: Database, run_id: int, steps: int) -> Times:
    """Measure windows whose lengths are spread over the powers of ten."""
    choose, calls = random.Random(0), []
    for _ in range(WINDOWS):
        length = int(10 ** choose.uniform(0, math.log10(steps)))
        first = choose.randint(1, steps - length + 1)
        calls.append(partial(opened, database, run_id, first, first + length - 1))
    return timed(calls)


def main() -> None:
    """Measure from rows, freeze, and measure from files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--compared-steps", type=int, default=1_000_000)
    parser.add_argument("--ended", type=int, default=100)
    options = parser.parse_known_args()[0]
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = LocalStore(folder)
        files = StepFiles(lambda: store)

        def fresh(path: str) -> Database:
            return Database(f"sqlite:///{folder / path}", files)

        def add(what: str, before: float, after: float, digits: int = 1) -> float:
            rows.append((what, f"{before:.{digits}f}", f"{after:.{digits}f}"))
            return after

        def add_times(what: str, before: tuple[float, float], after: tuple[float, float]) -> float:
            add(f"{what}, processor ms", before[1], after[1])
            return add(f"{what}, ms", before[0], after[0])

        database = fresh("long.db")
        database.migrate()
        long = recorded(database, options.steps)
        size = used_bytes(database)
        opened(database, long)
        before = timed([partial(opened, database, long)] * ROUNDS)
        randomly = random_windows(database, long, options.steps)
        seconds = frozen(database, store, [long], folder)
        with database.reading() as session:
            file_bytes = session.scalar(select(func.sum(FrozenSteps.size_bytes))) or 0
        cold_database = Database(str(database.engine.url), StepFiles(lambda: store))
        cold = timed([partial(opened, cold_database, long)])
        after = timed([partial(opened, database, long)] * ROUNDS)
        randomly_after = random_windows(database, long, options.steps)
        found = {
            "bytes": add("bytes a step in the file", 0, file_bytes / options.steps, 2),
            "open": add_times("open, median", before.at(0.5), after.at(0.5)),
            "p99": add_times("random windows, p99", randomly.at(0.99), randomly_after.at(0.99)),
        }
        add_times("random windows, median", randomly.at(0.5), randomly_after.at(0.5))
        add_times("open for the first time", before.at(1.0), cold.at(1.0))
        add(
            "bytes a step in the database",
            size / options.steps,
            used_bytes(database) / options.steps,
            2,
        )
        add("freeze, µs a step", 0, seconds / options.steps * 1e6)
        database.dispose()

        database = fresh("compared.db")
        database.migrate()
        ids = [recorded(database, options.compared_steps) for _ in range(COMPARED)]
        compared(database, ids)
        rounds = timed([partial(compared, database, ids)] * ROUNDS)
        frozen(database, store, ids, folder)
        compared(database, ids)
        again = timed([partial(compared, database, ids)] * ROUNDS)
        what = f"{COMPARED} runs × {options.compared_steps:,} steps compared, median"
        found["compare"] = add_times(what, rounds.at(0.5), again.at(0.5)) / 1000
        database.dispose()

        database = fresh("ended.db")
        database.migrate()
        empty = used_bytes(database)
        ids = [recorded(database, ENDED_STEPS) for _ in range(options.ended)]
        sizes = [used_bytes(database)]
        frozen(database, store, ids, folder)
        sizes.append(used_bytes(database))
        per_run = [(each - empty) / options.ended * ALL_ENDED / 1e6 for each in sizes]
        what = (
            f"database, MB of {ALL_ENDED:,} ended runs of {ENDED_STEPS:,} steps, by {options.ended}"
        )
        found["database"] = add(what, *per_run)
        database.dispose()
    limits = ", ".join(f"{key} ≤ {bar:g}" for key, bar in BARS.items())
    report(
        "history",
        f"{limits}; {options.steps:,} steps",
        ("", "rows", "frozen"),
        rows,
        measured=", ".join(f"{key} {value:.3g}" for key, value in found.items()),
        passed=all(found[key] <= bar for key, bar in BARS.items()),
    )


if __name__ == "__main__":
    main()
