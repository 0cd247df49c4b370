"""One clock for all processes of a machine."""

import time


def clock() -> float:
    """Return seconds of a clock that all processes of this machine share and nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
