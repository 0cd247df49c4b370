"""Messages of a sweep's live stream: a marker that changes with its page."""

from app.live.live import Poll, Update
from app.live.messages import SweepMessage, encode
from db.database import Database
from db.sweeps import sweeps


def of_sweep(database: Database, sweep_id: int) -> Poll:
    """Return the function that polls a sweep; clients fetch the page after a change."""

    def poll(cursor: str) -> Update | None:
        with database.read_only() as session:
            mark = sweeps.mark(session, sweep_id)
        return None if mark == cursor else Update(encode(SweepMessage(mark=mark)), mark)

    return poll
