"""Logged metrics: bytes a point and points recorded a second, on both databases.

Each value is a falling curve with normal noise, as float32 (`loss.item()`) or as float64, whose
noise alone takes 6.7 bytes. Runs have ended. A flush has ten points of each metric, or one. Bytes
include `latest_metrics` and indexes; PostgreSQL's are those after VACUUM FULL.
"""

import time
from collections.abc import Iterator

import numpy as np
from sqlalchemy import Connection, text

from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database
from db.queue import queue
from db.tables import Status
from db.telemetry import telemetry
from halfstep.telemetry.events import Metric

#: Runs, metrics, points per metric, and points of a metric in a flush.
CASES = (
    (1, 300, 10_000, 10),
    (1, 300, 1500, 10),
    (1, 300, 300, 1),
    (10, 300, 50, 10),
    (20, 20, 300, 10),
)
EVERY = 50
BAR = 8
TABLES = ("metric_blocks", "metric_tails", "latest_metrics")
SIZES = {
    "sqlite": "SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE name LIKE '%{}%'",
    "postgresql": "SELECT pg_total_relation_size('{}')",
}


def flushes(metrics: int, points: int, batch: int, kind: type) -> Iterator[telemetry.Flush]:
    """Return the points of a run."""
    rng = np.random.default_rng(0)
    falling = 2 * np.exp(-np.arange(points) / points * 3)
    values = (falling[:, None] + rng.normal(0, 0.1, (points, metrics))).astype(kind).tolist()
    for first in range(0, points, batch):
        yield telemetry.Flush(
            events=[
                Metric(step=n * EVERY, name=f"m{m // 20}/{m}", value=value, elapsed_ms=n * 250)
                for n in range(first, min(first + batch, points))
                for m, value in enumerate(values[n])
            ]
        )


def size(connection: Connection) -> int:
    """Return the bytes of all metric tables."""
    query = SIZES[connection.dialect.name]
    return sum(connection.scalar(text(query.format(table))) for table in TABLES)


def measure(
    database: Database, runs: int, metrics: int, points: int, batch: int, kind: type
) -> tuple[float, float, float]:
    """Return bytes per point, and points per second of elapsed and of CPU time."""
    with database.reading() as session:
        empty = size(session.connection())
    wall = cpu = 0.0
    for _ in range(runs):
        run_id = synthetic.start_run(database)
        made = list(flushes(metrics, points, batch, kind))
        wall, cpu = wall - time.perf_counter(), cpu - time.process_time()
        for flush in made:
            synthetic.record(database, run_id, flush)
        wall, cpu = wall + time.perf_counter(), cpu + time.process_time()
        with database.writing() as session:
            queue.end(session, run_id, 1, Status.FINISHED)
    if database.engine.dialect.name == "postgresql":
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as direct:
            direct.execute(text(f"VACUUM FULL {', '.join(TABLES)}"))
    number = runs * metrics * points
    with database.reading() as session:
        return (size(session.connection()) - empty) / number, number / wall, number / cpu


def main() -> None:
    """Measure all cases on new databases."""
    rows, most = [], {np.float32: 0.0, np.float64: 0.0}
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        for case in CASES:
            for kind in most:
                with opened() as database:
                    taken, by_wall, by_cpu = measure(database, *case, kind)
                most[kind] = max(most[kind], taken)
                speeds = (f"{by_wall:,.0f}", f"{by_cpu:,.0f}")
                rows.append((name, *case, kind.__name__, f"{taken:.1f}", *speeds))
    report(
        "metric_points",
        f"≤ {BAR} bytes a point, indexes and `latest_metrics` included",
        (
            *("database", "runs", "metrics", "points of each", "of these in a flush"),
            *("values", "bytes a point", "points/s", "points/s of CPU time"),
        ),
        rows,
        measured=f"{most[np.float32]:.1f} bytes of float32, {most[np.float64]:.1f} of float64",
        passed=max(most.values()) <= BAR,
    )


if __name__ == "__main__":
    main()
