"""One clock for all processes of a machine."""

import time
from functools import partial

#: Returns seconds of a clock that all processes of this machine share and nobody can set.
clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
