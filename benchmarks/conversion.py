"""Conversion of a run of 10,000,000 steps that an earlier version recorded as rows.

    python -m benchmarks.conversion [--steps 10000000] [--save]

A server converts such runs in the background after an upgrade. The time includes the pauses, each
as long as the turn before it, in which other writers have the database. The longest turn is what
one of them may have to wait.
"""

import argparse
import time
from threading import Event

import numpy as np

from benchmarks import databases, disk, synthetic
from benchmarks.report import report
from db.database import Database
from db.tables import Run, StepConversion
from db.telemetry import block_codec, step_blocks, step_conversion
from db.telemetry.pyramid import SIZES
from tests.db.telemetry.earlier_steps import store_rows

STEPS = 10_000_000
PART = 4 * SIZES[-1]  # steps that are made at once: their summaries are complete
BAR_SECONDS = 1.0


class Turns(Event):
    """A stop signal that is never set, and records the length of each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Pause as a server does."""
        self.seconds.append(timeout or 0.0)
        return super().wait(timeout)


def record_as_rows(database: Database, run_id: int, steps: int) -> None:
    """Store a run as an earlier version did: a row per step, and summaries of all sizes."""
    rng = np.random.default_rng(0)
    for first in range(0, steps, PART):
        numbers = np.arange(first, min(first + PART, steps))
        columns = block_codec.of_records(synthetic.make_steps(numbers, rng))
        with database.writing() as session:
            store_rows(session.connection(), run_id, columns)
    with database.writing() as session:
        session.add(StepConversion(run_id=run_id))
        session.get_one(Run, run_id).last_elapsed_ms = None


def convert(database: Database, steps: int) -> tuple[float, float, float, float]:
    """Return seconds, the longest turn, and bytes per step before and after."""
    run_id = synthetic.start_run(database)
    record_as_rows(database, run_id, steps)
    before, turns, started = _bytes(database), Turns(), time.perf_counter()
    step_conversion.convert(database, run_id, stopping=turns)
    seconds = time.perf_counter() - started
    with database.reading() as session:
        assert step_blocks.count(session.connection(), run_id) == steps
    return seconds, max(turns.seconds), before / steps, _bytes(database) / steps


def _bytes(database: Database) -> int:
    disk.vacuum(database)
    return disk.bytes_of(database, *disk.STEPS, "step_buckets")


def main() -> None:
    """Convert a run on each database."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_known_args()[0].steps
    rows = []
    speeds, longest = [], []
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        with opened() as database:
            seconds, turn, before, after = convert(database, steps)
        speeds.append(steps / seconds)
        longest.append(turn)
        figures = f"{seconds:.0f}", f"{speeds[-1]:,.0f}", f"{turn:.2f}"
        rows.append((name, f"{steps:,}", *figures, f"{before:.1f}", f"{after:.1f}"))
    header = ("database", "steps", "s", "steps/s", "longest turn, s")
    report(
        "conversion",
        f"no turn > {BAR_SECONDS:g} s",
        (*header, "bytes a step before", "after"),
        rows,
        measured=f"{max(longest):.2f} s; {min(speeds):,.0f} steps/s with pauses",
        passed=max(longest) <= BAR_SECONDS,
    )


if __name__ == "__main__":
    main()
