"""News of the grid of workers: the rows that changed."""

import json

from app.live import Look, News
from app.rendering import fragment
from db import grid, rights
from db.database import Database
from db.grid import Row
from db.rights import Standing

LIVE_SECONDS = 2.0  # as often as machines are sampled
#: Workers whose changes a page follows.
MOST_FOLLOWED = 300


def of_workers(database: Database, standing: Standing) -> Look:
    """Return what looks for rows that changed. A cursor has the marks of those that are shown."""

    def look(cursor: str) -> News | None:
        with database.reading() as session:
            rights.limit(session, standing)
            rows = grid.read(session, MOST_FOLLOWED)
        now = cursor_of(rows)
        if now == cursor:
            return None
        seen = dict(each.split("-", 1) for each in cursor.split(".") if "-" in each)
        changed = [row for row in rows if seen.get(str(row.id)) != row.mark]
        html = fragment("_workers.html", rows=changed)
        return News(json.dumps({"html": html, "keys": [str(row.id) for row in rows]}), now)

    return look


def cursor_of(rows: list[Row]) -> str:
    """Return the cursor of somebody who sees these rows as they are."""
    return ".".join(f"{row.id}-{row.mark}" for row in rows[:MOST_FOLLOWED])
