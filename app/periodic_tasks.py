"""Background tasks of the server, each repeated at an interval in a thread."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from db.database import is_outage

logger = logging.getLogger(__name__)

#: Seconds that a stopping server waits for a task; each may be killed at any moment.
GRACE_SECONDS = 3.0


@contextmanager
def repeating(
    works: dict[str, tuple[Callable[[], object], float]], stopping: Event
) -> Iterator[None]:
    """Run each task at once and then at its interval, until the context ends.

    Each has a thread, so a slow one delays no other; errors are logged.  works: tasks by name.
    stopping: set at the end, for long tasks to check.
    """
    threads = [
        Thread(target=_repeat, args=(name, *work, stopping), name=name, daemon=True)
        for name, work in works.items()
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
            if not is_outage(error):  # each request reports an outage
                logger.exception("%s failed", name)
        if stopping.wait(seconds):
            return
