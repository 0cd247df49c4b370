"""1,000 random windows of 10,000,000 steps: CPU time, and whether each is correct."""

import math
import random
import time

from benchmarks import synthetic
from benchmarks.report import report
from db.telemetry import step_blocks, windows

WINDOWS = 1000
CHECKED = 100  # against the raw steps, which takes the longer


def main() -> None:
    """Read windows with lengths spread evenly over the powers of ten."""
    database = synthetic.long_run()
    choose = random.Random(0)
    times, most, wrong = [], 0, 0
    for number in range(WINDOWS):
        length = int(10 ** choose.uniform(0, math.log10(synthetic.LONG_STEPS)))
        first = choose.randint(1, synthetic.LONG_STEPS - length + 1)
        last = first + length - 1
        with database.reading() as session:
            started = time.process_time()
            window = windows.windows_of(session, [1], first=first, last=last).get(1)
            times.append((time.process_time() - started) * 1000)
            assert window is not None
            most = max(most, *(len(line.x) for line in window.series.values()))
            if number < CHECKED:
                columns = step_blocks.read_columns(session.connection(), 1, (first, last))
                drawn, losses = window.series["loss"].y, columns["loss"]
                wrong += (min(drawn), max(drawn)) != (losses.min(), losses.max())
    times.sort()
    p50, p99, worst = times[WINDOWS // 2], times[WINDOWS * 99 // 100 - 1], times[-1]
    report(
        "random_windows",
        "p99 ≤ 40 ms of CPU time, ≤ 5,000 points, true minimum and maximum always there",
        (
            "windows",
            "CPU ms, p50",
            "CPU ms, p99",
            "CPU ms, worst",
            "most points",
            "wrong extremes of 100 checked",
        ),
        [(WINDOWS, f"{p50:.1f}", f"{p99:.1f}", f"{worst:.1f}", most, wrong)],
        measured=f"{p99:.1f} ms, {most:,} points, {wrong} wrong",
        passed=p99 <= 40 and most <= 5000 and not wrong,
    )


if __name__ == "__main__":
    main()
