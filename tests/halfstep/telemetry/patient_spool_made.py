"""Shared helpers of the tests of patient spool."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full(size: int) -> Iterator[None]:
    """Limit the size of files: the write that exceeds it is cut short, and the next one raises."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heeded = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heeded)
