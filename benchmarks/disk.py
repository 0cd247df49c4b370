"""Disk space per step: its share of blocks, flagged rows and the pyramid.

Scaler events are separate rows of some 40 bytes each. They have their own column, because their
number depends on the scaler. Here every 500th step is skipped, which makes three of them.
PostgreSQL's have the free space that a flush leaves, which autovacuum gives to later ones: here
VACUUM runs after each fourth of a run, as it would in a training of some minutes.
"""

from sqlalchemy import text

from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database

BARS = {"sqlite": 11, "postgresql": 14}

#: Whole pages of each table or index, what is free in them included.
SIZES = {
    "sqlite": "SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE name LIKE :table",
    "postgresql": "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
    "WHERE relkind = 'r' AND relname LIKE :table",
}
#: PostgreSQL counts a table's indexes with it.
STEPS = ("steps", "ix_steps_%", "%step_blocks%")


def main() -> None:
    """Record runs of several lengths, and measure the files."""
    rows = []
    for opened in (databases.sqlite, databases.postgresql):
        for steps in (100_000, 1_000_000):
            with opened() as database:
                run_id = synthetic.start_run(database)
                flushes = list(synthetic.flushes(steps))
                for number, flush in enumerate(flushes, 1):
                    synthetic.record(database, run_id, flush)
                    if number % (len(flushes) // 4) == 0:
                        vacuum(database)
                rows.append(_row(database, steps))
    rows.append(_row(synthetic.long_run(), synthetic.LONG_STEPS + 10_000))
    most = {name: max(float(row[4]) for row in rows if row[0] == name) for name in BARS}
    report(
        "disk",
        " and ".join(f"≤ {bar} bytes a step ({name})" for name, bar in BARS.items()),
        ("database", "steps of the run", "steps", "pyramid", "both", "scaler events"),
        rows,
        measured=" and ".join(f"{figure:.1f}" for figure in most.values()),
        passed=all(most[name] <= bar for name, bar in BARS.items()),
    )


def vacuum(database: Database) -> None:
    """Free the space of deleted rows, as autovacuum does."""
    if database.engine.dialect.name == "postgresql":
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as direct:
            direct.execute(text("VACUUM"))


def bytes_of(database: Database, *names: str) -> int:
    """Return the bytes of tables, and of SQLite's indexes, by name patterns."""
    with database.reading() as session:
        query = text(SIZES[database.engine.dialect.name])
        return sum(int(session.execute(query, {"table": name}).scalar_one()) for name in names)


def _row(database: Database, steps: int) -> tuple[str, ...]:
    rows, buckets, events = (
        bytes_of(database, *names) / steps
        for names in (STEPS, ("step_buckets",), ("%scaler_events%",))
    )
    figures = (f"{figure:.1f}" for figure in (rows, buckets, rows + buckets, events))
    return database.engine.dialect.name, f"{steps:,}", *figures


if __name__ == "__main__":
    main()
