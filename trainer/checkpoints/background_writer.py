"""A thread that writes checkpoints during training: one task at a time, in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Writer:
    """Runs slow tasks in a thread; raises their errors in the caller."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._under_way: Future[Any] | None = None

    def begin(self, write: Callable[[], Any]) -> None:
        """Start a task after the current one. Raises the error of the current one."""
        self.wait()
        self._under_way = self._thread.submit(write)

    def wait(self) -> None:
        """Wait for the current task. Raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def check(self) -> None:
        """Raise the error of a finished task; does not wait."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait for the thread's end; an unreported error is lost."""
        self._thread.shutdown()
