"""Every step of a run as CSV, streamed: not what a screen has use for, but all of it."""

import csv
from collections.abc import Iterator
from io import StringIO

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from app.auth import SignedIn
from app.context import Db, TheDatabase
from db import runs, series
from db.database import Database

router = APIRouter(prefix="/runs/{run_id}", tags=["series"])

PAGE_STEPS = 5000


@router.get("/steps.csv", response_class=StreamingResponse)
def export_steps(
    run_id: int, session: Db, database: TheDatabase, _visitor: SignedIn
) -> StreamingResponse:
    """Export all steps."""
    run = runs.get(session, run_id)
    name = f"run{run.id}-steps.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_pages(database, run_id), media_type="text/csv", headers=headers)


def _pages(database: Database, run_id: int) -> Iterator[str]:
    seen, is_first = 0, True
    while True:
        with database.reading() as session:
            columns = series.raw_steps(session, run_id, first=seen + 1, most=PAGE_STEPS)
        text = StringIO()
        writer = csv.writer(text)
        if is_first:
            writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        yield text.getvalue()
        if not columns["step"]:
            return
        seen, is_first = columns["step"][-1], False
