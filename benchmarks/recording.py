"""Steps that one worker records durably per second, with pyramid and events."""

import statistics
import time

from benchmarks import databases, synthetic
from benchmarks.report import report
from db.database import Database

STEPS = 200_000
ROUNDS = 5
BAR = 100_000


def steps_a_second(database: Database, batch: int) -> float:
    """Record a run; return its speed without the time to make the numbers."""
    run_id = synthetic.start_run(database)
    seconds = 0.0
    for flush in synthetic.flushes(STEPS, batch):
        started = time.perf_counter()
        synthetic.record(database, run_id, flush)
        seconds += time.perf_counter() - started
    return STEPS / seconds


def main() -> None:
    """Measure each database and batch size in turn, for several rounds."""
    with databases.sqlite() as sqlite, databases.postgresql() as postgresql:
        cases = [
            (name, database, batch)
            for name, database in (("SQLite", sqlite), ("PostgreSQL", postgresql))
            for batch in (1000, 5000)
        ]
        rounds = [
            [steps_a_second(database, batch) for _, database, batch in cases] for _ in range(ROUNDS)
        ]
    rows = [
        (name, batch, *(f"{f(speeds):,.0f}" for f in (statistics.median, max)))
        for (name, _, batch), speeds in zip(cases, zip(*rounds, strict=True), strict=True)
    ]
    header = ("database", "steps a transaction", "steps/s, median of 5 rounds", "best")
    slowest = min(max(map(statistics.median, pair)) for pair in _pairs(rounds))
    report(
        "recording",
        f"≥ {BAR:,} steps/s on both, durable (fsync at each commit)",
        header,
        rows,
        measured=f"{slowest:,.0f} steps/s on the slower one",
        passed=slowest >= BAR,
    )


def _pairs(rounds: list[list[float]]) -> list[list[tuple[float, ...]]]:
    """Group the speeds of each case by database."""
    cases = list(zip(*rounds, strict=True))
    return [cases[:2], cases[2:]]


if __name__ == "__main__":
    main()
