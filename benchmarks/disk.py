"""Bytes that a step takes on disk in SQLite: with its events, and its share of the pyramid."""

from pathlib import Path

from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database


def main() -> None:
    """Record runs of some lengths and look at the file."""
    rows = []
    for steps in (100_000, 1_000_000):
        with databases.sqlite() as database:
            run_id = synthetic.start_run(database)
            before = _size(database)
            for flush in synthetic.flushes(steps):
                synthetic.record(database, run_id, flush)
            rows.append((f"{steps:,}", f"{(_size(database) - before) / steps:.1f}"))
    steps = synthetic.LONG_STEPS + 10_000
    rows.append((f"{steps:,}", f"{_size(synthetic.long_run()) / steps:.1f}"))
    most = max(float(size) for _, size in rows)
    report(
        "disk",
        "≤ 60 bytes a step",
        ("steps of the run", "bytes a step"),
        rows,
        measured=f"{most:.1f} bytes",
        passed=most <= 60,
    )


def _size(database: Database) -> int:
    database.dispose()  # the last connection to close leaves one file, with no journal beside it
    return Path(str(database.engine.url.database)).stat().st_size


if __name__ == "__main__":
    main()
