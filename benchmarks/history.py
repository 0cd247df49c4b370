"""Bytes per step of long histories, and response times of their charts.

python -m benchmarks.history [--steps 10000000] [--compared-steps 1000000]
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import insert, literal, select

from benchmarks import synthetic
from benchmarks.report import report
from db.database import Database
from db.queue import queue
from db.tables import Run, ScalerEvent, Status, Step, StepBlock, StepBucket
from db.telemetry import windows

COMPARED, WINDOWS, ROUNDS = 20, 300, 15
#: Bytes per step, milliseconds and seconds.
BARS = {"bytes": 11.0, "open": 30.0, "p99": 40.0, "compare": 0.12}


def record_run(database: Database, steps: int) -> int:
    """Record and end a run with this number of steps."""
    run_id = synthetic.start_run(database)
    for flush in synthetic.flushes(steps, 50_000):
        synthetic.record(database, run_id, flush)
    with database.writing() as session:
        queue.end(session, run_id, 1, Status.FINISHED)
    return run_id


def copy_run(database: Database, source: int) -> int:
    """Create a run by copying another's history, which is faster than recording it."""
    run_id = synthetic.start_run(database)
    with database.writing() as session:
        connection = session.connection()
        for kind in (Step, StepBlock, StepBucket, ScalerEvent):
            table = kind.__table__
            names = [column.name for column in table.c if column.name != "id"]
            values = [literal(run_id) if name == "run_id" else table.c[name] for name in names]
            rows = select(*values).where(table.c.run_id == source)
            connection.execute(insert(kind).from_select(names, rows))
        run, original = session.get_one(Run, run_id), session.get_one(Run, source)
        for name in ("step", "skipped", "recorded_steps"):
            setattr(run, name, getattr(original, name))
        queue.end(session, run_id, 1, Status.FINISHED)
    return run_id


def count_used_bytes(database: Database) -> int:
    """Return the bytes of SQLite's pages in use."""
    with database.engine.connect() as connection:
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


class Times(NamedTuple):
    """Sorted elapsed and CPU milliseconds; other programs lengthen the elapsed time only."""

    wall: list[float]
    processor: list[float]

    def at(self, share: float) -> tuple[float, float]:
        """Return a quantile of both times."""
        index = max(0, round(len(self.wall) * share) - 1)
        return self.wall[index], self.processor[index]


def time_calls(calls: Iterable[Callable[[], object]]) -> Times:
    """Return the times of calls."""
    times = []
    for call in calls:
        started, worked = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - started, time.process_time() - worked))
    return Times(*(sorted(1000 * each for each in column) for column in zip(*times, strict=True)))


def open_charts(
    database: Database, run_id: int, first: int | None = None, last: int | None = None
) -> None:
    """Read a run's charts."""
    with database.reading() as session:
        assert windows.windows_of(session, [run_id], first=first, last=last).get(run_id) is not None


def compare(database: Database, run_ids: list[int]) -> None:
    """Read the losses of runs, as the comparison page does."""
    with database.reading() as session:
        found = windows.windows_of(session, run_ids, most=1000, names={"loss"})
    assert len(found) == len(run_ids)


def random_windows(database: Database, run_id: int, steps: int) -> Times:
    """Measure windows with lengths spread evenly over the powers of ten."""
    choose, calls = random.Random(0), []
    for _ in range(WINDOWS):
        length = int(10 ** choose.uniform(0, math.log10(steps)))
        first = choose.randint(1, steps - length + 1)
        calls.append(partial(open_charts, database, run_id, first, first + length - 1))
    return time_calls(calls)


def main() -> None:
    """Measure one long run, and a comparison of several."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--compared-steps", type=int, default=1_000_000)
    options = parser.parse_known_args()[0]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:

        def fresh(path: str) -> Database:
            database = Database(f"sqlite:///{Path(folder) / path}")
            database.migrate()
            return database

        def add(what: str, times: tuple[float, float]) -> float:
            rows.append([what, *(f"{each:.1f}" for each in times)])
            return times[1]

        database = fresh("long.db")
        empty = count_used_bytes(database)
        long = record_run(database, options.steps)
        found = {"bytes": (count_used_bytes(database) - empty) / options.steps}
        rows.append(["bytes a step, with scaler events", f"{found['bytes']:.2f}", ""])
        again = time_calls([partial(open_charts, database, long)] * ROUNDS)
        found["open"] = add("open, median", again.at(0.5))
        randomly = random_windows(database, long, options.steps)
        found["p99"] = add("random windows, p99", randomly.at(0.99))
        add("random windows, median", randomly.at(0.5))
        database.dispose()

        database = fresh("compared.db")
        ids = [record_run(database, options.compared_steps)]
        ids += [copy_run(database, ids[0]) for _ in range(COMPARED - 1)]
        compare(database, ids)
        rounds = time_calls([partial(compare, database, ids)] * ROUNDS)
        what = f"{COMPARED} runs × {options.compared_steps:,} steps compared, median"
        found["compare"] = add(what, rounds.at(0.5)) / 1000
        database.dispose()
    limits = ", ".join(f"{key} ≤ {bar:g}" for key, bar in BARS.items())
    report(
        "history",
        f"{limits}; {options.steps:,} steps",
        ("", "ms", "processor ms"),
        rows,
        measured=", ".join(f"{key} {value:.3g}" for key, value in found.items()),
        passed=all(found[key] <= bar for key, bar in BARS.items()),
    )


if __name__ == "__main__":
    main()
