"""One clock for all processes of a machine."""

import time
from functools import partial

#: Returns seconds of a clock that is common to all processes of the machine and cannot be set.
clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
