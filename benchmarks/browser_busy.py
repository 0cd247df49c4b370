"""Load of the browser's main thread for a run at 200 steps a second with all rows visible."""

from benchmarks.following import follow
from benchmarks.report import report
from benchmarks.site import serving

STEPS, STEPS_A_SECOND, SECONDS = 100_000, 200, 30
BAR = 0.15


def main() -> None:
    """Follow the run, while Chromium measures the time of its tasks."""
    with serving(STEPS) as site, site.feeding(STEPS_A_SECOND):
        followed = follow(site, SECONDS)
    frames = len(followed.frames) / SECONDS
    report(
        "browser_busy",
        f"≤ {BAR:.0%} of the main thread",
        ("busy", "of it on the processor", "frames a second", "points of a line"),
        [(f"{followed.busy:.1%}", f"{followed.processor:.1%}", f"{frames:.1f}", followed.points)],
        measured=f"{followed.busy:.1%}",
        passed=followed.busy <= BAR,
    )


if __name__ == "__main__":
    main()
