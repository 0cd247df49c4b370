"""Files on their way to a bucket, while what a training tells meanwhile is recorded."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]


class Uploads:
    """Events whose files are sent in a thread, one event after another, in their order."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        """send: has an event's files in the store when it returns; it may take minutes."""
        self._send = send
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._waiting: deque[Event] = deque()
        self._under_way: Future[None] | None = None  # of the first that waits

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, events: Iterable[Event]) -> None:
        """Let events wait for their turn."""
        self._waiting.extend(events)

    @property
    def is_idle(self) -> bool:
        """Whether some wait, and none is under way."""
        return bool(self._waiting) and self._under_way is None

    def begin_next(self) -> None:
        """Begin with the first that waits."""
        self._under_way = self._thread.submit(self._send, self._waiting[0])

    def arrived(self) -> list[Event]:
        """Return the one that has arrived, if one has. Raises what sending it did; it waits on."""
        if self._under_way is None or not self._under_way.done():
            return []
        sent, self._under_way = self._under_way, None
        sent.result()
        return [self._waiting.popleft()]

    def finish(self) -> list[Event]:
        """Wait for what is under way; return all that waited, which this is rid of."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()
        events = list(self._waiting)
        self._waiting.clear()
        return events
