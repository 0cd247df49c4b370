"""Live streams: one polling task per subject, however many browsers watch it.

A viewer is identified by its cursor only. Viewers at the same cursor share one query and one
encoding; a viewer that reconnects with the cursor of its last message continues from there. A
subject without viewers has no task.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
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
#: Returns whether there may be changes since a cursor, at a lower cost than a poll.
HasChanged = Callable[[str], Awaitable[bool]]


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


class Live:
    """All subjects with viewers."""

    def __init__(self) -> None:
        self._viewers: dict[str, set[Viewer]] = defaultdict(set)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def subjects(self) -> list[str]:
        """The watched subjects."""
        return list(self._tasks)

    async def stream(
        self,
        subject: str,
        cursor: str,
        poll: Poll,
        *,
        seconds: float,
        has_changed: HasChanged | None = None,
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield changes of a subject since a cursor as they occur.

        seconds: polling interval.  has_changed: a poll is left out while it returns False.
        """
        yield ServerSentEvent(comment="watching", retry=RECONNECT_MS)
        if self._closed:
            return
        viewer, viewers = Viewer(cursor), self._viewers[subject]
        viewers.add(viewer)
        if subject not in self._tasks:
            self._tasks[subject] = asyncio.create_task(
                self._follow(subject, poll, has_changed, seconds)
            )
        try:
            while (update := await viewer.updates.get()) is not None:
                yield ServerSentEvent(raw_data=update.data, id=update.cursor)
        finally:
            viewers.discard(viewer)

    def close(self) -> None:
        """End every stream: the server is about to stop."""
        self._closed = True
        for viewers in self._viewers.values():
            for viewer in viewers:
                viewer.end()

    async def _follow(
        self, subject: str, poll: Poll, has_changed: HasChanged | None, seconds: float
    ) -> None:
        viewers = self._viewers[subject]
        try:
            while viewers and not self._closed:
                by_cursor: dict[str, list[Viewer]] = defaultdict(list)
                for viewer in viewers:
                    if not viewer.sent_away:
                        by_cursor[viewer.cursor].append(viewer)
                for cursor, group in by_cursor.items():
                    try:
                        update = await self._poll(poll, has_changed, cursor)
                    except Exception:  # affects this cursor only
                        logger.exception("%s: polling from cursor %.200r failed", subject, cursor)
                        for viewer in group:
                            viewer.end()
                        continue
                    if update is not None:
                        for viewer in group:
                            viewer.send(update)
                await asyncio.sleep(seconds)
        finally:
            for viewer in viewers:
                viewer.end()
            del self._viewers[subject], self._tasks[subject]

    async def _poll(self, poll: Poll, has_changed: HasChanged | None, cursor: str) -> Update | None:
        try:
            if has_changed is not None and not await has_changed(cursor):
                return None
            return await asyncio.to_thread(poll, cursor)
        except Exception as error:
            if not is_outage(error):
                raise
            logger.warning("live streams wait for the database: %s", error)
            return None
