"""A brake on guessing passwords: who was wrong a few times must wait, longer each time.

It lives in this process's memory: a restart forgets it, and the guesses cost Argon2 all the same.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from db.errors import HalfstepError

#: Tries without a wait. A name has more than an address, as strangers can use them up for others.
FREE_TRIES = {"address": 5, "name": 20}
MOST_SECONDS = 60.0
#: Whoever has not tried for so long starts anew.
FORGET_SECONDS = 600.0


class TooManyTries(HalfstepError):
    """Too many sign-ins were tried."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        unit = "second" if seconds == 1 else "seconds"
        super().__init__(f"Too many wrong passwords. Try again in {seconds} {unit}.")


def client_of(request: Request, name: str) -> dict[str, str]:
    """Return by what the tries of this client for this user are counted."""
    return {"address": request.client.host if request.client else "", "name": name.strip()[:64]}


@dataclass
class _Tries:
    count: int = 0
    last: float = 0.0
    open_at: float = 0.0


class Brake:
    """Counts the tries of each client's address and each user's name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: dict[tuple[str, str], _Tries] = {}
        self._lock = threading.Lock()

    def take(self, **who: str) -> None:
        """Count a try by address and name, before it is made. Raises TooManyTries."""
        with self._lock:
            now = self._clock()
            self._forget_before(now - FORGET_SECONDS)
            tries = [self._tries.setdefault(key, _Tries(last=now)) for key in who.items()]
            if (wait := max(each.open_at for each in tries) - now) > 0:
                raise TooManyTries(int(-(-wait // 1)))
            for (kind, _), each in zip(who.items(), tries, strict=True):
                each.count, each.last = each.count + 1, now
                extra = each.count - FREE_TRIES[kind]
                each.open_at = now + min(2.0 ** min(extra, 10), MOST_SECONDS) if extra >= 0 else now

    def release(self, **who: str) -> None:
        """Forget the tries of somebody who knew the password."""
        with self._lock:
            for key in who.items():
                self._tries.pop(key, None)

    def _forget_before(self, oldest: float) -> None:
        for key in [key for key, each in self._tries.items() if each.last < oldest]:
            del self._tries[key]
