"""Lease renewal during work that takes minutes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WAITING_SECONDS = 0.4

Done = TypeVar("Done")


def wait_for(work: Callable[[], Done], meanwhile: Callable[[], None]) -> Done:
    """Run `work` in a thread and return its result; call `meanwhile` until then.

    `work` may take minutes: transfers to or from a bucket must not prevent lease renewal.
    """
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        while True:
            try:
                return working.result(timeout=WAITING_SECONDS)
            except TimeoutError:
                if working.done():  # `work` itself raised TimeoutError
                    raise
                meanwhile()
