"""Opening a run of 10,000,000 steps, compared with 10,000: the whole window, cold.

Cold means that neither SQLite nor the system has any of the database in memory. The server itself
has answered a request before.
"""

import os
import statistics
import time
from typing import Any

from benchmarks import synthetic
from benchmarks.report import report
from db.database import Database
from db.telemetry import windows

ROUNDS = 15


def open_cold(database: Database, run_id: int) -> tuple[float, windows.Window]:
    """Return a window of a run, and its CPU milliseconds with a cold cache."""
    database.dispose()
    path = str(database.engine.url.database)
    with open(path, "rb") as file:  # noqa: PTH123 - only its number is needed
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.process_time()
    with database.reading() as session:
        window = windows.windows_of(session, [run_id]).get(run_id)
    milliseconds = (time.process_time() - started) * 1000
    assert window is not None
    return milliseconds, window


def main() -> None:
    """Open both runs in turn."""
    database = synthetic.long_run()
    for run_id in (1, 2):
        open_cold(database, run_id)
    rounds = [(open_cold(database, 1), open_cold(database, 2)) for _ in range(ROUNDS)]
    rows: list[tuple[Any, ...]] = []
    medians: list[float] = []
    for opened in zip(*rounds, strict=True):
        times, window = [milliseconds for milliseconds, _ in opened], opened[0][1]
        medians.append(statistics.median(times))
        shown = (f"{medians[-1]:.1f}", f"{max(times):.1f}")
        rows.append((f"{window.total:,}", window.points, window.bucket, *shown))
    rows.append(("ratio", "", "", f"{medians[0] / medians[1]:.2f}", ""))
    header = (
        "steps of the run",
        "points",
        "steps a bucket",
        "CPU ms, median of 15",
        "CPU ms, worst",
    )
    ratio = medians[0] / medians[1]
    report(
        "opening",
        "≤ 30 ms of CPU time; ratio ≤ 2",
        header,
        rows,
        measured=f"{medians[0]:.1f} ms; {ratio:.2f}",
        passed=medians[0] <= 30 and ratio <= 2,
    )


if __name__ == "__main__":
    main()
