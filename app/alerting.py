"""What the server does beside serving: it looks which rules hold, and makes deliveries."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Self

from app.delivering import deliver
from db import channels, deliveries, secrets
from db.database import Database, is_outage
from db.deliveries import Outcome
from db.noticing import Seen, look
from db.settings import Settings
from db.tables import Channel, Delivery

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
PRUNE_SECONDS = 3600.0
#: A server that stops waits no longer for a receiver; what it took is tried again by the next.
GRACE_SECONDS = 3.0


class Alerting:
    """Two threads, so that a slow receiver keeps nobody from looking; a context manager, which
    ends them.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._stopping = Event()
        self._seen = Seen()
        self._pruned_at = -PRUNE_SECONDS
        self._threads = [
            Thread(target=self._repeat, args=(work,), name=work.__name__, daemon=True)
            for work in (self.notice, self.deliver)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(GRACE_SECONDS)

    def notice(self) -> None:
        """Look once which rules hold."""
        look(self._database, self._seen, self._settings.address)

    def deliver(self) -> None:
        """Try what is due once; a few at a time, and each for itself."""
        if time.monotonic() - self._pruned_at > PRUNE_SECONDS:
            self._pruned_at = time.monotonic()
            with self._database.writing() as session:
                deliveries.prune(session)
        while not self._stopping.is_set():
            with self._database.reading() as session:
                if not deliveries.is_any_due(session):
                    return
            with self._database.writing() as session:
                taken = deliveries.take(session)
            if not taken:  # another server was faster
                return
            outcomes = asyncio.run(self._attempt(taken))
            with self._database.writing() as session:
                for (row, _channel), outcome in zip(taken, outcomes, strict=True):
                    deliveries.note(session, row.id, row.attempts, outcome)

    async def _attempt(self, taken: Sequence[tuple[Delivery, Channel]]) -> list[Outcome]:
        return await asyncio.gather(*(self._one(row, channel) for row, channel in taken))

    async def _one(self, row: Delivery, channel: Channel) -> Outcome:
        if not channel.is_on and row.notice_id is not None:
            return Outcome(False, "not sent: the channel was switched off", is_final=True)
        try:
            reach = channels.reach(self._settings.secrets_key, channel)
        except secrets.Unreadable as error:
            logger.warning("delivery %d: %s", row.id, error)
            return Outcome(False, "not sent: the server cannot decrypt the channel's address")
        try:
            return await deliver(self._settings, reach, row.id, row.body)
        except Exception:  # of this delivery: all others go on
            logger.exception("delivery %d failed", row.id)
            return Outcome(False, "the server failed at this; what it says of it is in its log")

    def _repeat(self, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except Exception as error:
                if not is_outage(error):  # of an outage, each request tells
                    logger.exception("alerts: %s failed", work.__name__)
            if self._stopping.wait(LOOK_SECONDS):
                return
