"""Live streams: one task per subject, however many browsers watch it.

A viewer is identified by its cursor only. Viewers at the same cursor share one query and one
encoding; a viewer that reconnects with the cursor of its last message continues from there. A
subject without viewers has no task.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from fastapi.sse import ServerSentEvent

from db.database import is_outage

logger = logging.getLogger(__name__)

#: A viewer this many messages behind is disconnected; its browser reconnects with its cursor.
MESSAGES_WAITING = 50
RECONNECT_MS = 1000


@dataclass(frozen=True)
class Update:
    """The encoded changes since a cursor, and the cursor after them."""

    data: str
    cursor: str
    is_last: bool = False  # there will be no more changes; the stream ends


#: Returns the changes since a cursor, or None. Called in a thread.
Poll = Callable[[str], Update | None]
#: Within the context, calls a function whenever there may be changes since one of the cursors.
Watching = Callable[[Collection[str], Callable[[], object]], AbstractContextManager[None]]


@dataclass(eq=False)
class Viewer:
    """One open stream."""

    cursor: str
    updates: "asyncio.Queue[Update | None]" = field(
        default_factory=lambda: asyncio.Queue(MESSAGES_WAITING)
    )
    sent_away: bool = False

    def send(self, update: Update) -> None:
        """Send changes, or end the stream of a viewer that is too slow."""
        self.cursor = update.cursor
        try:
            self.updates.put_nowait(update)
            if update.is_last:
                self.sent_away = True
                self.updates.put_nowait(None)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End the stream; the viewer gets pending changes when it reconnects."""
        self.sent_away = True
        while not self.updates.empty():
            self.updates.get_nowait()
        self.updates.put_nowait(None)


@dataclass(eq=False)
class Subject:
    """A watched subject."""

    viewers: set[Viewer] = field(default_factory=set)
    # Set when a viewer comes, when the last one leaves and when there may be changes.
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class Live:
    """All subjects with viewers."""

    def __init__(self) -> None:
        self._subjects: dict[str, Subject] = {}
        self._closed = False

    @property
    def subjects(self) -> list[str]:
        """The names of the watched subjects."""
        return list(self._subjects)

    @property
    def count(self) -> int:
        """Number of open streams."""
        return sum(len(subject.viewers) for subject in self._subjects.values())

    async def stream(
        self,
        name: str,
        cursor: str,
        poll: Poll,
        *,
        seconds: float = 0.0,
        watching: Watching | None = None,
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield changes of a subject since a cursor as they occur.

        seconds: polling interval.  watching: wakes the subject for its polls instead.
        """
        yield ServerSentEvent(comment="watching", retry=RECONNECT_MS)
        if self._closed:
            return
        viewer, subject = Viewer(cursor), self._subjects.get(name)
        if subject is None:
            subject = self._subjects[name] = Subject()
            subject.task = asyncio.create_task(self._follow(name, subject, poll, watching, seconds))
        subject.viewers.add(viewer)
        subject.woken.set()
        try:
            while (update := await viewer.updates.get()) is not None:
                yield ServerSentEvent(raw_data=update.data, id=update.cursor)
        finally:
            subject.viewers.discard(viewer)
            if not subject.viewers:
                subject.woken.set()

    def close(self) -> None:
        """End every stream: the server is about to stop."""
        self._closed = True
        for subject in self._subjects.values():
            subject.woken.set()
            for viewer in subject.viewers:
                viewer.end()

    async def _follow(
        self, name: str, subject: Subject, poll: Poll, watching: Watching | None, seconds: float
    ) -> None:
        viewers = subject.viewers
        try:
            while viewers and not self._closed:
                subject.woken.clear()
                by_cursor: dict[str, list[Viewer]] = defaultdict(list)
                for viewer in viewers:
                    if not viewer.sent_away:
                        by_cursor[viewer.cursor].append(viewer)
                for cursor, group in by_cursor.items():
                    try:
                        update = await self._poll(poll, cursor)
                    except Exception:  # affects this cursor only
                        logger.exception("%s: polling from cursor %.200r failed", name, cursor)
                        for viewer in group:
                            viewer.end()
                        continue
                    if update is not None:
                        for viewer in group:
                            viewer.send(update)
                if watching is None:
                    await asyncio.sleep(seconds)
                    continue
                cursors = {viewer.cursor for viewer in viewers if not viewer.sent_away}
                # Without a cursor all viewers have been sent away, and leave soon.
                with watching(cursors, subject.woken.set) if cursors else nullcontext():
                    await subject.woken.wait()
        finally:
            for viewer in viewers:
                viewer.end()
            del self._subjects[name]

    async def _poll(self, poll: Poll, cursor: str) -> Update | None:
        try:
            return await asyncio.to_thread(poll, cursor)
        except Exception as error:
            if not is_outage(error):
                raise
            logger.warning("live streams wait for the database: %s", error)
            return None
