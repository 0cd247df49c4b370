"""Repeated requests: for a run that goes on, and while the server is away."""

import time
from collections.abc import Callable
from typing import TypeVar

from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import is_away
from halfstep.number_formats import duration

ENDED = ("finished", "failed", "cancelled")
POLL_SECONDS = 1.0  # poll interval of `follow`
AWAY_SECONDS = 300.0  # default time for which an unavailable server is retried
LONGEST_PAUSE_SECONDS = 30.0  # between two of these retries

T = TypeVar("T")


def patiently(request: Callable[[], T], patience: float, on_outage: Callable[[str], None]) -> T:
    """Return a request's result; retry with exponential backoff while the server is away."""
    pause, until = POLL_SECONDS, time.monotonic() + patience
    while True:
        try:
            return request()
        except ApiError as error:
            left = until - time.monotonic()
            if not is_away(error) or left <= 0:
                raise
            if pause == POLL_SECONDS:
                on_outage(f"{error}; retrying for {duration(patience)}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
