"""Messages of the workers page's live stream: changed rows."""

from app.html.rendering import fragment
from app.live.live import Poll, Update
from app.live.messages import WorkersMessage, encode
from db.access import permissions
from db.access.permissions import Grants
from db.database import Database
from db.queue import device_grid
from db.queue.device_grid import Row

LIVE_SECONDS = 2.0  # the interval of system samples
#: Workers whose changes a page follows.
MOST_FOLLOWED = 300


def of_workers(database: Database, grants: Grants) -> Poll:
    """Return the function that polls for changed rows. A cursor has the marks of shown rows."""

    def poll(cursor: str) -> Update | None:
        with database.reading() as session:
            permissions.limit(session, grants)
            rows = device_grid.read(session, MOST_FOLLOWED)
        now = cursor_of(rows)
        if now == cursor:
            return None
        seen = dict(mark.split("-", 1) for mark in cursor.split(".") if "-" in mark)
        changed = [row for row in rows if seen.get(str(row.id)) != row.mark]
        html = fragment("workers/_workers.html", rows=changed)
        keys = [str(row.id) for row in rows]
        return Update(encode(WorkersMessage(html=html, keys=keys)), now)

    return poll


def cursor_of(rows: list[Row]) -> str:
    """Return the cursor of a page with these rows."""
    return ".".join(f"{row.id}-{row.mark}" for row in rows[:MOST_FOLLOWED])
