"""Files on their way to a bucket, while what a training tells meanwhile is recorded."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeAlias

from halfstep.telemetry.spool import Position

Event: TypeAlias = dict[str, Any]


class Stopped(Exception):
    """Nothing more is to be sent."""


class Uploads:
    """Events whose files are sent in a thread, in their order; and files that are deleted in it."""

    def __init__(
        self, send: Callable[[dict[str, Any]], None], delete: Callable[[list[str]], None]
    ) -> None:
        """send: has a file in the store when it returns; it may take minutes.

        delete: has files of these keys out of it.
        """
        self._send, self._delete = send, delete
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._waiting: deque[tuple[Event, Position]] = deque()
        self._sent: deque[Event] = deque()  # the first of those that wait
        self._retired: list[str] = []
        self._under_way: Future[None] | None = None
        self._is_stopped = False

    def __bool__(self) -> bool:
        return bool(self._waiting or self._retired)

    @property
    def since(self) -> Position | None:
        """From where in the spool on there are events that wait; None if none does."""
        return self._waiting[0][1] if self._waiting else None

    def add(self, events: Iterable[Event], since: Position) -> None:
        """Let events wait for their turn.  since: they come after this position in the spool."""
        self._waiting.extend((event, since) for event in events)

    def retire(self, keys: list[str]) -> None:
        """Let files wait for their deletion."""
        self._retired += keys

    @property
    def can_begin(self) -> bool:
        """Whether some wait, and none is under way."""
        return bool(self) and self._under_way is None

    def begin(self) -> None:
        """Send all that wait and have not been, one after another, and delete what is to go."""
        unsent = islice(self._waiting, len(self._sent), None)
        events, keys = [event for event, _since in unsent], list(self._retired)
        self._under_way = self._thread.submit(self._work, events, keys)

    def arrived(self) -> list[Event]:
        """Return those that have arrived by now. Raises what sending or deleting did."""
        is_over = self._under_way is not None and self._under_way.done()
        arrived = [self._sent.popleft() for _ in range(len(self._sent))]
        for _event in arrived:
            self._waiting.popleft()
        if is_over and not arrived:
            self.wait()
        return arrived

    def wait(self) -> None:
        """Wait for what is under way. Raises what it raised: it waits on."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def stop(self) -> None:
        """Send nothing more but the file that is under way."""
        self._is_stopped = True

    def _work(self, events: list[Event], keys: list[str]) -> None:
        for event in events:
            for file in files_of(event):
                if self._is_stopped:
                    raise Stopped
                self._send(file)
            self._sent.append(event)
        if keys:
            self._delete(keys)
            del self._retired[: len(keys)]


def files_of(event: Event) -> list[dict[str, Any]]:
    """Return the files that an event tells of: those of a checkpoint, or an artifact itself."""
    return event["files"] if event["event"] == "checkpoint" else [event]
