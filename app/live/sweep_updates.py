"""What a sweep's live stream sends: that something is new, and whether it is the last."""

import json

from app.live.live import Look, News
from db.database import Database
from db.sweeps import sweeps


def of_sweep(database: Database, sweep_id: int) -> Look:
    """Return what looks for news of one sweep; who hears them fetches what it shows."""

    def look(cursor: str) -> News | None:
        with database.glancing() as session:
            mark = sweeps.mark(session, sweep_id)
        return None if mark == cursor else News(json.dumps({"mark": mark}), mark)

    return look
