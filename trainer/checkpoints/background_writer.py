"""A thread that writes beside the training: one thing at a time, in the order given."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Writer:
    """Does what takes long while others go on; what it raises, it raises in them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._under_way: Future[Any] | None = None

    def begin(self, write: Callable[[], Any]) -> None:
        """Start it, once what is under way is done, and return. Raises what that raised."""
        self.wait()
        self._under_way = self._thread.submit(write)

    def wait(self) -> None:
        """Wait for what is under way. Raises what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def check(self) -> None:
        """Raise what it raised if it is done; wait for nothing."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait for the thread's end; what it raised and nobody heard is lost."""
        self._thread.shutdown()
