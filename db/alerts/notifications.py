"""Notifications of waiting work between processes, by PostgreSQL NOTIFY.

Each transaction sends at most one NOTIFY when it commits. It is only a hint: a process that misses
it reads the same from the database a little later. SQLite has no notifications.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any
from uuid import uuid4

from sqlalchemy import event, exists, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db.database import Database
from db.tables import Run, Status

#: Payload instead of a worker's id: there may be a run for any worker with free devices.
SIGNED_IN = 0
_CHANNEL = "halfstep"
_PENDING = "word"
#: PostgreSQL allows 8,000; a longer list of workers is replaced by SIGNED_IN.
MOST_CHARACTERS = 7_000
#: Delay before a listener reconnects, and timeout of its test notification.
RETRY_SECONDS, PROOF_SECONDS = 5.0, 2.0
#: Time within which a closed listener stops.
TURN_SECONDS = 5.0


def notify(session: Session, *worker_ids: int) -> None:
    """Notify these workers, or SIGNED_IN for all, when the session's transaction commits."""
    session.info.setdefault(_PENDING, set()).update(worker_ids)


@event.listens_for(Session, "before_commit")
def _send(session: Session) -> None:
    ids: set[int] = session.info.pop(_PENDING, set())
    if not ids or session.get_bind().dialect.name != "postgresql":
        return
    payload = ",".join(map(str, sorted(ids)))
    if len(payload) > MOST_CHARACTERS:
        payload = str(SIGNED_IN)
    statement = select(func.pg_notify(_CHANNEL, payload))
    if ids == {SIGNED_IN}:  # an end matters only if runs are queued
        statement = statement.where(exists().where(Run.status == Status.QUEUED))
    session.execute(statement)


class Listener:
    """Receiver of notifications in its own thread, over a dedicated connection.

    is_listening: a test notification arrived; otherwise poll as often as without a listener.
    problem: why it is not listening.
    """

    def __init__(self, database: Database, on_notify: Callable[[set[int]], None]) -> None:
        """on_notify: called in that thread with the addressed ids; SIGNED_IN after a reconnect."""
        self.is_listening = False
        self.problem: str | None = None
        self._database, self._on_notify = database, on_notify
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the listener if the database is PostgreSQL."""
        if self._database.engine.dialect.name == "postgresql":
            threading.Thread(target=self._run, name="listener", daemon=True).start()

    def close(self) -> None:
        """Request the listener to stop soon."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                pooled = self._database.engine.raw_connection()
                connection: Any = pooled.driver_connection
                pooled.detach()
                with connection:
                    self._listen(connection)
            except (DBAPIError, self._database.engine.dialect.loaded_dbapi.Error) as error:
                self.problem = str(error).strip().partition("\n")[0]
            self.is_listening = False
            self._closing.wait(RETRY_SECONDS)

    def _listen(self, connection: Any) -> None:
        connection.autocommit = True
        connection.execute(f"LISTEN {_CHANNEL}")
        # A transaction pooler accepts LISTEN but forwards no notifications.
        proof = f"proof {uuid4()}"
        with self._database.read_only() as session:
            session.execute(select(func.pg_notify(_CHANNEL, proof)))
        with closing(connection.notifies(timeout=PROOF_SECONDS)) as notifications:
            has_arrived = any(row.payload == proof for row in notifications)
        if not has_arrived:
            self.problem = "no notification arrives (is there a transaction pooler?)"
            return
        self.is_listening, self.problem = True, None
        self._on_notify({SIGNED_IN})
        while not self._closing.is_set():
            for row in connection.notifies(timeout=TURN_SECONDS):
                if row.payload.replace(",", "").isdecimal():  # not a test notification
                    self._on_notify(set(map(int, row.payload.split(","))))
