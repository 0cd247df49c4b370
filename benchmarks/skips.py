"""Skipped steps that are shown, at any zoom: 10,000,000 steps with 20,000 skips."""

from sqlalchemy import func, select

from benchmarks import synthetic
from benchmarks.report import report
from db.tables import FLAGGED, Step
from db.telemetry import windows


def main() -> None:
    """Zoom from the whole run into a thousand steps."""
    database = synthetic.long_run()
    rows = []
    for length in (10_000_000, 3_000_000, 1_000_000, 100_000, 10_000, 1000):
        first = min(4_000_001, synthetic.LONG_STEPS - length + 1)
        last = first + length - 1
        with database.reading() as session:
            window = windows.windows_of(session, [1], first=first, last=last).get(1)
            assert window is not None
            in_window = (Step.run_id == 1, Step.step.between(first, last), FLAGGED["skipped"])
            happened = session.scalars(select(func.count(Step.step)).where(*in_window)).one()
        skips = window.skips
        rows.append((f"{length:,}", happened, skips.total, sum(skips.counts), len(skips.steps)))
    header = ("steps", "skips that happened", "total shown", "sum of the ticks", "ticks")
    missing = sum(abs(row[1] - shown) for row in rows for shown in row[2:4])
    report(
        "skips",
        "all",
        header,
        rows,
        measured="all" if not missing else f"{missing} missing",
        passed=not missing,
    )


if __name__ == "__main__":
    main()
