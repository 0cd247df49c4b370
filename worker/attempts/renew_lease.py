"""Waiting for work that takes minutes, while a lease is renewed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WAITING_SECONDS = 0.4

Done = TypeVar("Done")


def wait_for(work: Callable[[], Done], meanwhile: Callable[[], None]) -> Done:
    """Return what `work` returns, which may take minutes; call `meanwhile` until then.

    Files on their way to or from a bucket must not keep a lease from being renewed.
    """
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        while True:
            try:
                return working.result(timeout=WAITING_SECONDS)
            except TimeoutError:
                if working.done():  # it was the work that timed out
                    raise
                meanwhile()
