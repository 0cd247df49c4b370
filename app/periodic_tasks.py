"""What the server does beside serving: pieces of work, each done again and again in a thread."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from db.database import is_outage

logger = logging.getLogger(__name__)

#: A server that stops waits no longer for what it began; each may be killed at any moment.
GRACE_SECONDS = 3.0


@contextmanager
def repeating(
    works: dict[str, tuple[Callable[[], object], float]], stopping: Event
) -> Iterator[None]:
    """Do each piece of work at once and every so many seconds, until it is left.

    A thread each, so that one that is slow keeps none of the others; what one raises is logged.
    works: by name.  stopping: set when it is left, for what takes long to look at.
    """
    threads = [
        Thread(target=_repeat, args=(name, *each, stopping), name=name, daemon=True)
        for name, each in works.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(GRACE_SECONDS)


def _repeat(name: str, work: Callable[[], object], seconds: float, stopping: Event) -> None:
    while True:
        try:
            work()
        except Exception as error:
            if not is_outage(error):  # of an outage, each request tells
                logger.exception("%s failed", name)
        if stopping.wait(seconds):
            return
