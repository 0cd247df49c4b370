"""Route of numbers as JSON lines, for curl and any language."""

from fastapi import APIRouter, Request

from app.auth.audit import unaudited
from app.auth.authentication import Sender
from app.dependencies import TheDatabase, ingesting
from app.files import json_lines
from app.files.ingest_api import TELEMETRY, Piece
from app.files.json_lines import Logged
from app.http.credentials import secret_of
from app.http.parameters import RunId
from app.http.rate_limit import RateLimit
from db.access import accounts

router = APIRouter(prefix="/ingest/{run_id}", tags=["watched runs"])

#: OpenAPI description of the body.
LINES = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-ndjson": {
                "schema": {"type": "string"},
                "example": '{"step": 1, "loss": 0.7, "lr": 0.001}\n{"step": 1, "accuracy": 0.5}\n',
            }
        },
    }
}


@router.post("/log", openapi_extra=LINES)
@unaudited(TELEMETRY)
async def log_lines(
    run_id: RunId, request: Request, sender: Sender, database: TheDatabase, body: Piece
) -> Logged:
    """Log numbers of a watched run, one JSON object per line, at most 1,000 lines and 1 MiB.

    `step` is required, `time` (seconds since 1970) is optional; each other field is a number. A
    line that is not recorded is named in `problems` and costs itself only. Sending lines again
    changes nothing, so a request without a response can be repeated. Above the limit of lines per
    minute and token (HALFSTEP_LOG_LINES_PER_MINUTE): error 429, with Retry-After in seconds.
    """
    limit: RateLimit = request.app.state.log_lines
    lines = sum(1 for line in body.splitlines() if line.strip())
    limit.take(accounts.hash_of(secret_of(request)), lines)

    def work() -> Logged:
        return json_lines.take(database, sender, run_id, body)

    return await ingesting(request, work)
