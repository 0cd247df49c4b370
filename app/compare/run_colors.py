"""Colours of runs: each has its own, the same in the list, in charts, notes and sweeps."""

from collections.abc import Iterable

#: Colours; beyond as many runs of one chart the lines are dashed.
COLORS = 10


def places(run_ids: Iterable[int]) -> dict[int, int]:
    """Return the place of each run's line: the ones digit is its colour, the tens are its dashes.

    A run has the colour of its own id, unless an older run of the same chart has it: then the next
    one that is free. app/static/charts/run_colors.js does the same.
    """
    taken: dict[int, int] = {}
    for run_id in sorted(set(run_ids)):
        used = set(taken.values())
        taken[run_id] = next(
            place
            for turn in range(len(used) + COLORS)
            if (place := turn // COLORS * COLORS + (run_id + turn) % COLORS) not in used
        )
    return taken
