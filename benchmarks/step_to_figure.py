"""From the end of a step to its point in the browser's figure, at 200 steps a second.

A process spools as a training does, another records as its supervisor does, a server streams and
Chromium draws; the run has 100,000 steps already, and all rows are visible. Counted is every step.
"""

from bisect import bisect_left

from sqlalchemy import select

from benchmarks.following import follow
from benchmarks.report import report
from benchmarks.site import serving
from db.tables import Step

STEPS, STEPS_A_SECOND, SECONDS = 100_000, 200, 30
BAR_MS = 500


def main() -> None:
    """Follow the run and compare the moments of steps and frames."""
    with serving(STEPS) as site, site.feeding(STEPS_A_SECOND):
        followed = follow(site, SECONDS)
        with site.database.reading() as session:
            ended = select(Step.step, Step.elapsed_ms).where(Step.run_id == 1, Step.step > STEPS)
            steps = session.execute(ended.order_by(Step.step)).all()
    drawn = [step for _, step in followed.frames]
    delays = sorted(
        followed.frames[bisect_left(drawn, step)][0] - moment
        for step, moment in steps
        if drawn[0] < step <= drawn[-1]
    )
    p50, p95 = delays[len(delays) // 2], delays[len(delays) * 95 // 100]
    report(
        "step_to_figure",
        f"p95 ≤ {BAR_MS} ms at {STEPS_A_SECOND} steps/s",
        ("steps", "frames", "ms, p50", "ms, p95", "ms, worst"),
        [
            (
                len(delays),
                len(followed.frames),
                f"{p50:.0f}",
                f"{p95:.0f}",
                f"{delays[-1]:.0f}",
            )
        ],
        measured=f"{p95:.0f} ms",
        passed=p95 <= BAR_MS,
    )


if __name__ == "__main__":
    main()
