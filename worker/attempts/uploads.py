"""Background uploads to a bucket, while recording of the training continues."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeAlias

from halfstep.telemetry.events import Artifact, Checkpoint, File, SavedArtifact
from halfstep.telemetry.spool import Position

#: An event whose files are stored before it is recorded.
Stored: TypeAlias = Artifact | Checkpoint


class Stopped(Exception):
    """Stop request: no more files are sent."""


class Uploads:
    """Queue of events whose files one thread sends in order; it also deletes files."""

    def __init__(self, send: Callable[[File], None], delete: Callable[[list[str]], None]) -> None:
        """send: stores a file before it returns; may take minutes.

        delete: deletes the files of these keys from the store.
        """
        self._send, self._delete = send, delete
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._waiting: deque[tuple[Stored, Position]] = deque()
        self._sent: deque[Stored] = deque()  # the first of `_waiting`
        self._pruned: list[str] = []
        self._under_way: Future[None] | None = None
        self._is_stopped = False

    def __bool__(self) -> bool:
        return bool(self._waiting or self._pruned)

    @property
    def since(self) -> Position | None:
        """Spool position after which events are waiting; None if none are."""
        return self._waiting[0][1] if self._waiting else None

    def add(self, events: Iterable[Stored], since: Position) -> None:
        """Queue events to be sent.  since: spool position that precedes them."""
        self._waiting.extend((event, since) for event in events)

    def prune(self, keys: list[str]) -> None:
        """Queue files to be deleted."""
        self._pruned += keys

    @property
    def can_begin(self) -> bool:
        """True if something is waiting and nothing is in progress."""
        return bool(self) and self._under_way is None

    def begin(self) -> None:
        """Start sending all unsent events in order, then deleting the pruned files."""
        unsent = islice(self._waiting, len(self._sent), None)
        events, keys = [event for event, _since in unsent], list(self._pruned)
        self._under_way = self._thread.submit(self._work, events, keys)

    def collect(self) -> list[Stored]:
        """Return the events sent so far. Raises errors from sending or deleting."""
        is_over = self._under_way is not None and self._under_way.done()
        arrived = [self._sent.popleft() for _ in range(len(self._sent))]
        for _event in arrived:
            self._waiting.popleft()
        if is_over and not arrived:
            self.wait()
        return arrived

    def wait(self) -> None:
        """Wait for the work in progress. Raises its error; its events stay queued."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def stop(self) -> None:
        """Send no more files after the one in progress."""
        self._is_stopped = True

    def _work(self, events: list[Stored], keys: list[str]) -> None:
        for event in events:
            for file in files_of(event):
                if self._is_stopped:
                    raise Stopped
                self._send(file)
            self._sent.append(event)
        if keys:
            self._delete(keys)
            del self._pruned[: len(keys)]


def files_of(event: Stored | SavedArtifact) -> Sequence[File]:
    """Return the files of an event; an artifact is one itself."""
    return [event] if isinstance(event, Artifact) else event.files
