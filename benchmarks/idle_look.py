"""Cost of a live stream's poll of an unchanged run with 200,000 points of metrics.

The server polls each run with a viewer twenty times a second; this measures the cost of a poll.
"""

import statistics
import tempfile
import time
from pathlib import Path

from app.live import run_updates
from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database
from db.runs import history, runs
from db.settings import Settings
from db.telemetry import telemetry
from halfstep.telemetry.events import Metric, StepEvent

POINTS = 200_000
BATCH = 20_000
LOOKS = 1000
BAR_MS = 1.0


def fill(database: Database, run_id: int) -> None:
    """Add steps and points of four metrics to a run."""
    for flush in synthetic.flushes(POINTS // 4):
        synthetic.record(database, run_id, flush)
    for first in range(0, POINTS, BATCH):
        points: list[StepEvent] = [
            Metric(name=f"m{n % 4}", step=n // 4 + 1, value=1.0, elapsed_ms=n)
            for n in range(first, first + BATCH)
        ]
        synthetic.record(database, run_id, telemetry.Flush(events=points))


def look_times(database: Database, folder: str) -> list[float]:
    """Return the milliseconds of each poll."""
    run_id = synthetic.start_run(database)
    fill(database, run_id)
    look = run_updates.of_run(database, Settings(data=Path(folder)), run_id)
    with database.reading() as session:
        cursor = str(history.cursor_now(session, runs.get(session, run_id)))
    times = []
    for _ in range(LOOKS):
        started = time.perf_counter()
        found = look(cursor)
        times.append((time.perf_counter() - started) * 1000)
        assert found is None
    return times


def main() -> None:
    """Measure on both databases."""
    rows, medians = [], []
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        with tempfile.TemporaryDirectory() as folder, opened() as database:
            times = sorted(look_times(database, folder))
        medians.append(statistics.median(times))
        rows.append((name, f"{medians[-1]:.2f}", f"{times[LOOKS * 99 // 100]:.2f}"))
    report(
        "idle_look",
        f"≤ {BAR_MS:g} ms on both databases",
        ("database", f"ms, median of {LOOKS:,}", "ms, 99 of 100"),
        rows,
        measured=f"SQLite {medians[0]:.2f} ms, PostgreSQL {medians[1]:.2f} ms",
        passed=max(medians) <= BAR_MS,
    )


if __name__ == "__main__":
    main()
