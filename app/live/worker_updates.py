"""News of the grid of workers: the rows that changed."""

import json

from app.html.rendering import fragment
from app.live.live import Look, News
from db.access import permissions
from db.access.permissions import Grants
from db.database import Database
from db.queue import device_grid
from db.queue.device_grid import Row

LIVE_SECONDS = 2.0  # as often as machines are sampled
#: Workers whose changes a page follows.
MOST_FOLLOWED = 300


def of_workers(database: Database, grants: Grants) -> Look:
    """Return what looks for rows that changed. A cursor has the marks of those that are shown."""

    def look(cursor: str) -> News | None:
        with database.reading() as session:
            permissions.limit(session, grants)
            rows = device_grid.read(session, MOST_FOLLOWED)
        now = cursor_of(rows)
        if now == cursor:
            return None
        seen = dict(each.split("-", 1) for each in cursor.split(".") if "-" in each)
        changed = [row for row in rows if seen.get(str(row.id)) != row.mark]
        html = fragment("workers/_workers.html", rows=changed)
        return News(json.dumps({"html": html, "keys": [str(row.id) for row in rows]}), now)

    return look


def cursor_of(rows: list[Row]) -> str:
    """Return the cursor of somebody who sees these rows as they are."""
    return ".".join(f"{row.id}-{row.mark}" for row in rows[:MOST_FOLLOWED])
