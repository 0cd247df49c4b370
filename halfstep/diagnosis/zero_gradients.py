"""Steps all of whose gradients are 0."""

import numpy as np
from numpy.typing import NDArray

from halfstep.telemetry.flags import SKIPPED, UNKNOWN_LOSS
from halfstep.telemetry.spool import Steps


def count_zero_steps(steps: Steps, before: int, applied: int) -> int:
    """Return the number of the last applied steps all of whose gradients were 0.

    before: that number before these steps.  applied: number of applied steps before them.

    A loss of 0 ends the count once there were gradients: then there is nothing left to learn.
    """
    flags = steps["flags"]
    its = steps[flags & SKIPPED == 0]
    is_zero = its["grad_norm"] == 0
    has_learned = (before < applied) | (np.cumsum(~is_zero) > 0)
    is_done = (its["loss"] == 0) & (its["flags"] & UNKNOWN_LOSS == 0) & has_learned
    return count_last(is_zero & ~is_done, before)


def count_last(are: NDArray[np.bool_], before: int) -> int:
    """Return the number of the last steps that all are so. before: that number before these."""
    others = np.flatnonzero(~are)
    start = -1 - int(others[-1]) if len(others) else before
    return start + len(are)
