"""Numbers of steps, as scripts give them."""

from contextlib import suppress
from operator import index
from typing import Any

import numpy as np

from halfstep.session.logged_values import as_scalar, is_number
from halfstep.telemetry.plain_json import LARGEST_WHOLE, safe_repr


class BadArgument(ValueError):
    """Invalid argument; the message names the value and what is allowed."""


def step_number(value: object) -> int:
    """Return a step's number, also of a float that is a whole number. Raises BadArgument."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool | np.bool_) and is_number(value):
            whole = index(value) if isinstance(value, int) else index_of(as_scalar(value))
            if 0 <= whole <= LARGEST_WHOLE:
                return whole
    raise BadArgument(f"its step is {safe_repr(value)}; allowed: a whole number from 0")


def index_of(number: Any) -> int:
    """Return a whole number. Raises TypeError, ValueError, OverflowError."""
    try:
        return index(number)
    except TypeError:
        if int(number) != float(number):
            raise
        return int(number)
