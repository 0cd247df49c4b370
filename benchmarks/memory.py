"""Memory of the recording process while it records 10,000,000 steps."""

import statistics
from pathlib import Path

from benchmarks import databases, synthetic
from benchmarks.report import report


def main() -> None:
    """Record them and compare the first tenth with the last."""
    resident = []
    with databases.sqlite() as database:
        run_id = synthetic.start_run(database)
        for flush in synthetic.flushes(synthetic.LONG_STEPS):
            synthetic.record(database, run_id, flush)
            resident.append(_resident_mib())
    tenth = len(resident) // 10
    first, last = (statistics.mean(part) for part in (resident[:tenth], resident[-tenth:]))
    report(
        "memory",
        "last ÷ first tenth ≤ 1.1",
        ("first tenth, MiB", "last tenth, MiB", "ratio", "most, MiB"),
        [(f"{first:.1f}", f"{last:.1f}", f"{last / first:.3f}", f"{max(resident):.1f}")],
        measured=f"{last / first:.3f}",
        passed=last / first <= 1.1,
    )


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    main()
