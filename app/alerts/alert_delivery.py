"""Periodic task that attempts due deliveries and records their outcomes."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from threading import Event

from app.alerts.alert_senders import deliver
from db.access import secrets
from db.alerts import channels, deliveries
from db.alerts.deliveries import Outcome, Taken
from db.alerts.script_alerts import SCRIPT
from db.database import Database
from db.settings import Settings
from db.tables import Channel, Delivery

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0


class AlertDelivery:
    """Delivery of alerts; attempts of a server that stops are retried by another one."""

    def __init__(self, settings: Settings, database: Database, stopping: Event) -> None:
        self._settings, self._database = settings, database
        self._stopping = stopping
        self._pruned_at = -PRUNE_SECONDS

    def deliver_due(self) -> None:
        """Attempt all due deliveries once, a few concurrently; they do not affect each other."""
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
                for (row, _channel, _is_visible), outcome in zip(taken, outcomes, strict=True):
                    deliveries.note(session, row.id, row.attempts, outcome)

    async def _attempt(self, taken: Sequence[Taken]) -> list[Outcome]:
        return await asyncio.gather(*(self._one(*row) for row in taken))

    async def _one(self, row: Delivery, channel: Channel, is_visible: bool) -> Outcome:
        if not is_visible:
            return Outcome(False, "not sent: you no longer see what it is about", is_final=True)
        if not channel.is_on and row.alert_id is not None:
            return Outcome(False, "not sent: the channel was disabled", is_final=True)
        try:
            target = channels.decrypt_address(self._settings.secrets_key, channel)
        except secrets.Unreadable as error:
            logger.warning("delivery %d: %s", row.id, error)
            return Outcome(False, "not sent: the server cannot decrypt the channel's address")
        try:
            return await deliver(self._settings, target, row.id, self._body(row))
        except Exception:  # only this delivery fails
            logger.exception("delivery %d failed", row.id)
            return Outcome(False, "an error occurred on the server; see its log")

    def _body(self, row: Delivery) -> str:
        """Return the payload, with this server's address in the link of a script's alert."""
        content = json.loads(row.body)
        if content.get("condition") != SCRIPT:
            return row.body
        run = content["run"]
        return json.dumps(content | {"run": run | {"url": self._settings.address + run["url"]}})
