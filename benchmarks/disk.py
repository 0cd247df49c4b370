"""Bytes that a step takes on disk in SQLite: its share of blocks, flagged rows and the pyramid.

Scaler events are separate rows of some 40 bytes each. They have their own column, because their
number depends on the scaler. Here every 500th step is skipped, which makes three of them.
"""

from sqlalchemy import text

from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database

BAR = 11

#: Whole pages of each table or index, what is free in them included.
SIZE = text("SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE name LIKE :table")


def main() -> None:
    """Record runs of some lengths and measure the files."""
    rows = []
    for steps in (100_000, 1_000_000):
        with databases.sqlite() as database:
            run_id = synthetic.start_run(database)
            for flush in synthetic.flushes(steps):
                synthetic.record(database, run_id, flush)
            rows.append(_row(database, steps))
    rows.append(_row(synthetic.long_run(), synthetic.LONG_STEPS + 10_000))
    most = max(float(row[3]) for row in rows)
    report(
        "disk",
        f"≤ {BAR} bytes a step, pyramid included",
        ("steps of the run", "steps", "pyramid", "both", "scaler events"),
        rows,
        measured=f"{most:.1f} bytes",
        passed=most <= BAR,
    )


def _row(database: Database, steps: int) -> tuple[str, ...]:
    with database.reading() as session:
        parts = [
            sum(session.execute(SIZE, {"table": name}).scalar_one() for name in names) / steps
            for names in (
                ("steps", "ix_steps_%", "%step_blocks%"),
                ("step_buckets",),
                ("%scaler_events%",),
            )
        ]
    rows, stones, events = parts
    return f"{steps:,}", f"{rows:.1f}", f"{stones:.1f}", f"{rows + stones:.1f}", f"{events:.1f}"


if __name__ == "__main__":
    main()
