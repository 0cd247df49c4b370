"""All that was recorded of a run, as files: not what a screen has use for, but every row."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from app.auth import SignedIn
from app.context import Db, TheDatabase
from app.in_flight import EXPORT
from app.parameters import RunId
from app.rights import requires
from db import export, runs
from db.rights import Right

router = APIRouter(prefix="/runs/{run_id}/export", tags=["series"])

FORMATS = {
    "csv": (export.as_csv, "text/csv"),
    "parquet": (export.as_parquet, "application/vnd.apache.parquet"),
}
CONTENT = {media_type: {"schema": {"type": "string"}} for _, media_type in FORMATS.values()}


@router.get(
    "/{name}.{kind}", response_class=StreamingResponse, responses={200: {"content": CONTENT}}
)
@requires(Right.DOWNLOAD, lasts=EXPORT)
def export_rows(
    run_id: RunId,
    name: Literal["steps", "events", "metrics"],
    kind: Literal["csv", "parquet"],
    session: Db,
    database: TheDatabase,
    _visitor: SignedIn,
) -> StreamingResponse:
    """Export all steps, all that the scaler did, or all metrics: page by page, never sampled."""
    runs.get(session, run_id)
    write, media_type = FORMATS[kind]
    headers = {"Content-Disposition": f'attachment; filename="run{run_id}-{name}.{kind}"'}
    pieces = write(database, run_id, name)
    return StreamingResponse(pieces, media_type=media_type, headers=headers)
