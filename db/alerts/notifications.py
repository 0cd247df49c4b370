"""Word that something waits, from one process on a PostgreSQL to the others.

Word is sent with the transaction that gives cause for it, one NOTIFY at most, and is a hint: who
misses some learns the same from the database a little later. SQLite has no such thing.
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

#: Of a word, in place of a worker's id: there may be a run for whoever has room.
SIGNED_IN = 0
_CHANNEL = "halfstep"
_PENDING = "word"
#: PostgreSQL takes 8,000; of more workers than fit everybody is told.
MOST_CHARACTERS = 7_000
#: Until a listener that lost its connection tries again, and until it believes that it is not told.
RETRY_SECONDS, PROOF_SECONDS = 5.0, 2.0
#: How soon one that is closed notices.
TURN_SECONDS = 5.0


def tell(session: Session, *worker_ids: int) -> None:
    """Notify these workers, or all, when the session's transaction commits."""
    session.info.setdefault(_PENDING, set()).update(worker_ids)


@event.listens_for(Session, "before_commit")
def _send(session: Session) -> None:
    told: set[int] = session.info.pop(_PENDING, set())
    if not told or session.get_bind().dialect.name != "postgresql":
        return
    payload = ",".join(map(str, sorted(told)))
    if len(payload) > MOST_CHARACTERS:
        payload = str(SIGNED_IN)
    word = select(func.pg_notify(_CHANNEL, payload))
    if told == {SIGNED_IN}:  # an end is of interest to those alone who wait
        word = word.where(exists().where(Run.status == Status.QUEUED))
    session.execute(word)


class Listener:
    """Hears word in a thread of its own, over one connection that is held for it.

    is_listening: it was shown that word comes; else look as often as without.  fault: why not.
    """

    def __init__(self, database: Database, hear: Callable[[set[int]], None]) -> None:
        """hear: told of whom a word is for, in that thread; of everybody after an interruption."""
        self.is_listening = False
        self.problem: str | None = None
        self._database, self._hear = database, hear
        self._closing = threading.Event()

    def start(self) -> None:
        """Begin, where there is word at all."""
        if self._database.engine.dialect.name == "postgresql":
            threading.Thread(target=self._run, name="listener", daemon=True).start()

    def close(self) -> None:
        """End soon."""
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
        # A pooler that lends a connection for each transaction takes LISTEN, and passes nothing on.
        proof = f"proof {uuid4()}"
        with self._database.glancing() as session:
            session.execute(select(func.pg_notify(_CHANNEL, proof)))
        with closing(connection.notifies(timeout=PROOF_SECONDS)) as heard:
            is_told = any(word.payload == proof for word in heard)
        if not is_told:
            self.problem = "no word comes, as behind a pooler of transactions"
            return
        self.is_listening, self.problem = True, None
        self._hear({SIGNED_IN})
        while not self._closing.is_set():
            for word in connection.notifies(timeout=TURN_SECONDS):
                if word.payload.replace(",", "").isdecimal():  # another's proof is for nobody here
                    self._hear(set(map(int, word.payload.split(","))))
