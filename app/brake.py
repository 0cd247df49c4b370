"""A brake on guessing passwords: who was wrong a few times must wait, longer each time.

What is counted is an address, and a name as one address tries it: nobody can keep another out by
guessing at a name, as a right password from an address that did not guess is let in. It lives in
this process's memory: a restart forgets it, and the guesses cost Argon2 all the same.
"""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from db.errors import HalfstepError
from db.names import key_of

#: Tries without a wait. Many people may come from one address, to as many names.
FREE_TRIES = {"address": 20, "name": 5}
MOST_SECONDS = 60.0
#: Whoever has not tried for so long starts anew, and so does the first of more than so many.
FORGET_SECONDS = 600.0
MOST_KEPT = 100_000


class TooManyTries(HalfstepError):
    """Too many sign-ins were tried."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        unit = "second" if seconds == 1 else "seconds"
        super().__init__(f"Too many wrong passwords. Try again in {seconds} {unit}.")


def client_of(request: Request, name: str) -> dict[str, str]:
    """Return by what the tries of this client for this user are counted."""
    address = network_of(request.client.host if request.client else "")
    return {"address": address, "name": f"{address} {key_of(name[:64])}"}


def network_of(address: str) -> str:
    """Return an address as it is counted: of IPv6 the /64, all of which one machine has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


@dataclass
class _Tries:
    count: int = 0
    last: float = 0.0
    open_at: float = 0.0


class Brake:
    """Counts the tries of each client's address, and of each name from there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: OrderedDict[tuple[str, str], _Tries] = OrderedDict()  # the latest last
        self._lock = threading.Lock()

    def take(self, **who: str) -> None:
        """Count a try by address and name, before it is made. Raises TooManyTries."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            tries = [self._tries.setdefault(key, _Tries(last=now)) for key in who.items()]
            if (wait := max(each.open_at for each in tries) - now) > 0:
                raise TooManyTries(int(-(-wait // 1)))
            for key, each in zip(who.items(), tries, strict=True):
                each.count, each.last = each.count + 1, now
                extra = each.count - FREE_TRIES[key[0]]
                each.open_at = now + min(2.0 ** min(extra, 10), MOST_SECONDS) if extra >= 0 else now
                self._tries.move_to_end(key)

    def release(self, **who: str) -> None:
        """Forget the tries of somebody who knew the password, at their own name alone: else who
        knows one could guess at all the others.
        """
        with self._lock:
            self._tries.pop(("name", who["name"]), None)
            if (address := self._tries.get(("address", who["address"]))) is not None:
                address.count, address.open_at = max(address.count - 1, 0), 0.0

    def _forget(self, now: float) -> None:
        while self._tries:
            oldest = next(iter(self._tries.values()))
            if oldest.last >= now - FORGET_SECONDS and len(self._tries) <= MOST_KEPT:
                return
            self._tries.popitem(last=False)
