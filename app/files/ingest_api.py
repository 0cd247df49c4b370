"""What uploaders of watched runs send: the run, its spool and files piece by piece, its end.

A token that may send opens these routes, a browser's cookie does not. Everything may be sent
again: 409 "offset" says where to go on, "stale_attempt" that a later attempt has begun, "ended"
that the run is over.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.auth import audit
from app.auth.authentication import Sender, check_may_send
from app.dependencies import Db, TheSettings, ingesting
from app.files import spool_ingest as pieces
from app.files.file_uploads import Arrival, take_file
from app.files.spool_ingest import SpoolPosition
from app.http.parameters import RowId, flaws, outsized
from db.access import projects
from db.errors import Invalid
from db.names import cleaned
from db.tables import LARGEST_COUNT, LARGEST_ID
from db.telemetry import ingest
from halfstep.telemetry.events import MOST_WORDS, NAME_CHARACTERS, PATH_CHARACTERS, TEXT_CHARACTERS
from halfstep.telemetry.spool import json_safe

router = APIRouter(prefix="/ingest", tags=["watched runs"])

Sequence = Annotated[int, Field(ge=0, le=LARGEST_ID)]
Offset = Annotated[int, Query(ge=0, le=LARGEST_COUNT)]
ShortText = Annotated[str, Field(max_length=NAME_CHARACTERS)]
PathText = Annotated[str, Field(max_length=PATH_CHARACTERS)]


class WatchedRun(BaseModel):
    """A run, and the attempt of it that is about to be sent."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$", description="Its own name for itself")]
    attempt: RowId
    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]
    project: ShortText | None = None
    config: Annotated[dict[str, Any] | None, Field(description="Whatever its script says")] = None
    tags: Annotated[list[ShortText], Field(max_length=50)] = []
    started: Annotated[AwareDatetime, Field(description="Of the run, by its machine's clock")]
    host: ShortText = ""
    versions: Annotated[dict[ShortText, ShortText], Field(max_length=50)] = {}
    command: Annotated[
        list[PathText], Field(max_length=MOST_WORDS, description="Of its script, without secrets")
    ] = []
    folder: Annotated[PathText, Field(description="In which that was started")] = ""


class Position(BaseModel):
    """Where the server is, and so where to go on."""

    sequence: int
    offset: int


class FilePosition(BaseModel):
    """How much of a file there is; stored: all of it, and it is what it should be."""

    offset: int
    stored: bool


class Begun(Position):
    """A run that is known, and where its attempt's spool is to go on."""

    run: int
    attempt: int
    page: Annotated[str, Field(description="Address of its page on this server")]


class End(BaseModel):
    """How an attempt's process ended."""

    status: Literal["finished", "failed", "terminated", "interrupted", "vanished"]
    step: Annotated[int, Field(ge=0, le=LARGEST_COUNT, description="The last one that it made")]
    error: Annotated[
        str | None, Field(max_length=TEXT_CHARACTERS, description="The traceback, if it raised")
    ] = None
    exit_code: Annotated[
        int | None,
        Field(ge=-255, le=255, description="Of its process, negative for a signal; null: unknown"),
    ] = None
    lost_bytes: Annotated[
        int | None, Field(ge=0, le=LARGEST_COUNT, description="Damaged, of its spool")
    ] = None


class Told(BaseModel):
    """That the server knows."""

    run: int
    status: str


@router.post("")
def begin(told: WatchedRun, session: Db, sender: Sender, request: Request) -> Begun:
    """Make a run, or find it again by its own id; a higher attempt shuts out the one before."""
    named = told.project or projects.DEFAULT
    known = ingest.known(session, sender, told.id)
    place = (known.id, known.project) if known else (None, named)
    check_may_send(request.state.known, *place)
    makes_project = named != projects.DEFAULT and not projects.listed(session, [named])
    config = json_safe(told.config or {})
    texts = {"versions": told.versions, "command": told.command, "folder": told.folder}
    if errors := outsized(config) or flaws({"config": config, **texts}):
        raise Invalid(errors)
    attempt = ingest.begin(
        session,
        sender,
        told.id,
        told.attempt,
        name=cleaned(told.name) or "watched",
        project=named,
        config=config,
        tags=", ".join(filter(None, (cleaned(tag.replace(",", " ")) for tag in told.tags))),
        started_at=told.started.timestamp(),
        host=told.host,
        versions=told.versions,
        command=told.command,
        folder=told.folder,
    )
    if known is None:
        with_it = f", and made its project {named}" if makes_project else ""
        text = f"a watched run began{with_it}"
        audit.note_now(session, request, sender, text, attempt.run_id)
    return Begun(
        run=attempt.run_id,
        attempt=attempt.attempt,
        sequence=attempt.sequence,
        offset=attempt.offset,
        page=f"/runs/{attempt.run_id}",
    )


async def _piece(request: Request, _sender: Sender) -> bytes:
    """Read the body: before the turn to work on it is waited for, which a slow line would keep."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise HTTPException(400, "The connection broke off.") from error


#: What a description for tools cannot see: the body is read as it is.
OCTETS = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}
Piece = Annotated[bytes, Depends(_piece)]


@router.put("/{run_id}/{attempt}/{sequence}", openapi_extra=OCTETS)
async def send_spool(
    run_id: RowId,
    attempt: RowId,
    sequence: Sequence,
    offset: Offset,
    request: Request,
    sender: Sender,
    body: Piece,
) -> Position:
    """Record a piece of `<attempt>-<sequence>.spool`, plain or gzip, from `offset` of it on.

    The answer's offset is where the last whole frame ends. A higher sequence begins at offset 0.
    """
    place = SpoolPosition(sender, run_id, attempt, sequence, offset)

    def work() -> int:
        return pieces.take_spool(request.app.state.database, place, _unpacked(request, body))

    return Position(sequence=sequence, offset=await ingesting(request, work))


@router.put("/{run_id}/{attempt}/files/{path:path}", openapi_extra=OCTETS)
async def send_file(
    run_id: RowId,
    attempt: RowId,
    path: str,
    offset: Offset,
    size: Annotated[int, Query(ge=0, le=LARGEST_COUNT, description="Of the whole file")],
    sha256: Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="Of the whole file")],
    request: Request,
    sender: Sender,
    body: Piece,
    settings: TheSettings,
) -> FilePosition:
    """Take a piece of a checkpoint or an artifact that the spool told of, by the path it has there.

    Once all of it is there its SHA-256 is checked, and the run's page has it to download.
    """
    file = Arrival(sender, run_id, attempt, path, size, sha256)

    def work() -> int:
        piece = _unpacked(request, body)
        return take_file(settings, request.app.state.database, file, offset, piece)

    end = await ingesting(request, work)
    return FilePosition(offset=end, stored=end == size)


@router.post("/{run_id}/{attempt}/end")
def end(run_id: RowId, attempt: RowId, told: End, session: Db, sender: Sender) -> Told:
    """Say how an attempt's process ended. A later attempt may go on with the run."""
    ingest.end(
        session,
        sender,
        run_id,
        attempt,
        told.status,
        step=told.step,
        error=told.error,
        exit_code=told.exit_code,
        lost_bytes=told.lost_bytes or 0,
    )
    return Told(run=run_id, status=told.status)


def _unpacked(request: Request, body: bytes) -> bytes:
    return pieces.unpacked(body, request.headers.get("content-encoding", ""))
