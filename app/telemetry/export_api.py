"""Exports of all recorded rows of a run as files, without downsampling."""

from typing import Literal

from fastapi.responses import StreamingResponse

from app.auth.routing import Router
from app.dependencies import Db, TheDatabase
from app.http.active_requests import EXPORT
from app.http.parameters import RunId
from db.access.permissions import Permission
from db.runs import runs
from db.telemetry import damage, damage_search, export

router = Router(prefix="/runs/{run_id}/export", tags=["series"])

FORMATS = {
    "csv": (export.as_csv, "text/csv"),
    "parquet": (export.as_parquet, "application/vnd.apache.parquet"),
}
#: Kinds of damage that an export lacks.
KINDS = {"steps": (damage.STEPS, damage.LOST), "metrics": (damage.METRIC, damage.FLUSH)}
CONTENT = {media_type: {"schema": {"type": "string"}} for _, media_type in FORMATS.values()}


@router.get(
    "/{name}.{kind}",
    Permission.DOWNLOAD_FILES,
    lasts=EXPORT,
    response_class=StreamingResponse,
    responses={200: {"content": CONTENT}},
)
def export_rows(
    run_id: RunId,
    name: Literal["steps", "events", "metrics"],
    kind: Literal["csv", "parquet"],
    session: Db,
    database: TheDatabase,
) -> StreamingResponse:
    """Export all steps, scaler events or metrics, page by page and never sampled.

    If some are damaged, the file's name ends with -damaged, and the header Halfstep-Damaged has
    what is left out.
    """
    runs.get(session, run_id)
    lost = damage_search.find_in_run(session.connection(), run_id, KINDS.get(name, ()))
    damage.note_all(lost)
    write, media_type = FORMATS[kind]
    file_name = f"run{run_id}-{name}{'-damaged' if lost else ''}.{kind}"
    headers = {"Content-Disposition": f'attachment; filename="{file_name}"'}
    pieces = write(database, run_id, name)
    return StreamingResponse(pieces, media_type=media_type, headers=headers)
