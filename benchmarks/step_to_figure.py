"""Time from the end of a step to its point in the last of the browser's panels.

One process spools like a training and another records like its supervisor. A server streams to
Chromium, which draws at full speed and slowed down to an old laptop's. The run has 100,000 steps
already, and all rows are visible. Every step counts, in the panel that shows it last.
"""

import math
import sys
from bisect import bisect_left

from benchmarks.following import Followed, follow
from benchmarks.report import report
from benchmarks.site import Site, serving
from db.telemetry import step_rows
from db.telemetry.pyramid import END

STEPS, SECONDS = 100_000, 15
RATES, THROTTLING = (50, 300), (1, 4, 6)
#: Factor by which the page's processor is slowed down.
BARS_MS = {1: 500, 4: 2000}


def main() -> None:
    """Follow the run, and compare the times of steps and frames."""
    rows, passed, worst = [], True, 0
    for rate in RATES:
        with serving(STEPS) as site, site.feeding(rate):
            for throttling in THROTTLING:
                followed = follow(site, SECONDS, throttling=throttling)
                delays = _delays(site, followed) or [math.inf]
                p50, p95 = delays[len(delays) // 2], delays[len(delays) * 95 // 100]
                spread = max((frame.spread for frame in followed.frames), default=0)
                passed &= p95 <= BARS_MS.get(throttling, p95) and not spread
                worst = max(worst, spread)
                row = (
                    f"{rate} steps/s, {throttling}x",
                    len(followed.frames),
                    f"{p50:.0f}",
                    f"{p95:.0f}",
                    f"{delays[-1]:.0f}",
                    spread,
                    f"{followed.busy:.1%}",
                    f"{followed.processor:.1%}",
                    f"{followed.longest:.0f}",
                )
                print(*row, file=sys.stderr, flush=True)
                rows.append(row)
    report(
        "step_to_figure",
        f"p95 ≤ {BARS_MS[1]} ms, ≤ {BARS_MS[4]} ms on a page slowed 4 times; no steps apart",
        (
            "run, page slowed",
            "frames",
            "ms, p50",
            "ms, p95",
            "ms, worst",
            "steps apart",
            "busy",
            "of it on the processor",
            "ms, longest task",
        ),
        rows,
        measured=f"{worst} steps apart",
        passed=passed,
    )


def _delays(site: Site, followed: Followed) -> list[float]:
    with site.database.reading() as session:
        rows = step_rows.read_rows(session, 1, first=STEPS + 1, most=END)
        steps = [(row.step, row.elapsed_ms) for row in rows]
    drawn = [min(frame.panels) for frame in followed.frames]
    return sorted(
        followed.frames[bisect_left(drawn, step)].moment - moment
        for step, moment in steps
        if drawn[0] < step <= drawn[-1]
    )


if __name__ == "__main__":
    main()
