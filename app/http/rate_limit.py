"""Rate limit per client, as a token bucket in the memory of this server."""

import math
import time
from threading import Lock

from db.errors import HalfstepError

#: Clients that are remembered at most; the others have waited long enough.
MOST_CLIENTS = 10_000


class RateLimited(HalfstepError):
    """Too many requests."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class RateLimit:
    """A number of units per minute for each client; as many at once after a pause."""

    def __init__(self, per_minute: int, noun: str) -> None:
        """per_minute: 0 for no limit.  noun: of what is counted."""
        self._most, self._noun = per_minute, noun
        self._lock = Lock()
        self._spent: dict[str, tuple[float, float]] = {}  # units and time of the last request

    def take(self, client: str, units: int) -> None:
        """Count units of a client. Raises RateLimited; the units are then not counted."""
        if not self._most:
            return
        with self._lock:
            moment = time.monotonic()
            spent, since = self._spent.pop(client, (0.0, moment))
            spent = max(spent - (moment - since) * self._most / 60, 0.0)
            is_over = spent + units > self._most and spent > 0
            self._spent[client] = (spent if is_over else spent + units, moment)
            while len(self._spent) > MOST_CLIENTS:
                del self._spent[next(iter(self._spent))]
        if is_over:
            wait = (spent + min(units, self._most) - self._most) * 60 / self._most
            limit = f"{self._most:,} {self._noun} a minute per token"
            raise RateLimited(f"Too many {self._noun}; allowed: {limit}.", max(math.ceil(wait), 1))
