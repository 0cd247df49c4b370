"""Ingest routes of watched runs: the run, its spool and files in pieces, its end.

These routes require an API token, not a browser's cookie. All requests can be repeated: error 409
has the code "offset" with the expected position, "stale_attempt" if a later attempt has begun, or
"ended" if the run has ended.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.auth import audit
from app.auth.audit import unaudited
from app.auth.authentication import Sender, check_may_upload
from app.dependencies import Db, TheSettings, ingesting
from app.files import spool_ingest as pieces
from app.files.file_uploads import FileUpload, take_file
from app.files.spool_ingest import SpoolPosition
from app.http.parameters import DocumentedModel, RowId, find_outsized, flaws
from app.telemetry.environment import Git, SourceFile
from db.access import projects
from db.errors import Invalid
from db.names import clean
from db.runs import environments
from db.tables import LARGEST_COUNT, LARGEST_ID
from db.telemetry import ingest
from halfstep.telemetry.event_fields import NAME_CHARACTERS, TEXT_CHARACTERS
from halfstep.telemetry.events import MOST_WORDS, PATH_CHARACTERS, SOURCE_BYTES
from halfstep.telemetry.plain_json import json_safe

router = APIRouter(prefix="/ingest", tags=["watched runs"])

#: Why the audit log does not record what a run uploads.
TELEMETRY = "Data of a run, whose beginning and end are recorded."

Sequence = Annotated[int, Field(ge=0, le=LARGEST_ID)]
Offset = Annotated[int, Query(ge=0, le=LARGEST_COUNT)]
ShortText = Annotated[str, Field(max_length=NAME_CHARACTERS)]
SourceText = Annotated[str, Field(max_length=SOURCE_BYTES)]
PathText = Annotated[str, Field(max_length=PATH_CHARACTERS)]


class WatchedRun(BaseModel):
    """A watched run and the attempt to upload."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """Identifier chosen by the client"""
    attempt: RowId = 1
    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]
    project: ShortText | None = None
    config: Annotated[dict[str, Any] | None, Field(description="Reported by its script")] = None
    tags: Annotated[list[ShortText], Field(max_length=50)] = []
    started: Annotated[AwareDatetime, Field(default_factory=lambda: datetime.now(UTC))]
    """Start of the run, by its machine's clock; default: now"""
    host: ShortText = ""
    versions: Annotated[dict[ShortText, ShortText], Field(max_length=50)] = {}
    command: Annotated[list[PathText], Field(max_length=MOST_WORDS)] = []
    """Command line of its script, without secrets"""
    folder: Annotated[PathText, Field(description="Working directory of the command")] = ""


class Position(BaseModel):
    """The position in the spool to continue from."""

    sequence: int
    offset: int


class FilePosition(BaseModel):
    """The progress of a file's upload."""

    offset: int
    stored: Annotated[bool, Field(description="Whether the file is complete and verified")]


class Begun(Position):
    """A registered run, and the positions in its attempt's spools to continue from."""

    run: int
    attempt: int
    sidecar_sequence: int
    sidecar_offset: int
    page: Annotated[str, Field(description="Path of its page on this server")]
    created_project: str | None = None
    """The run's project, if this request has created it"""


class End(DocumentedModel):
    """End of an attempt's process."""

    status: Literal["finished", "failed", "terminated", "interrupted", "vanished"]
    step: Annotated[int, Field(ge=0, le=LARGEST_COUNT, description="The last recorded step")]
    error: Annotated[str | None, Field(max_length=TEXT_CHARACTERS)] = None
    """The traceback, if it raised"""
    exit_code: Annotated[int | None, Field(ge=-255, le=255)] = None
    """Exit code, negative for a signal; null: unknown"""
    preemption: ShortText | None = None
    """By which signal of which batch system's job it was ended, if it was"""
    lost_bytes: Annotated[int | None, Field(ge=0, le=LARGEST_COUNT)] = None
    """Damaged bytes of its spool"""


class Source(BaseModel):
    """Git state, packages and source of an attempt."""

    file: SourceFile | None = None
    git: Git | None = None
    source: SourceText | None = None
    diff: SourceText | None = None
    requirements: SourceText | None = None


class Recorded(BaseModel):
    """Confirmation of a source or an end."""

    run: int
    status: str


@router.post("")
def begin(body: WatchedRun, session: Db, sender: Sender, request: Request) -> Begun:
    """Create a watched run, or find it by its id; a higher attempt replaces the one before."""
    named = body.project or projects.DEFAULT
    known = ingest.find_watched(session, sender, body.id)
    run_id, project = (known.id, known.project) if known else (None, named)
    check_may_upload(request.state.known, run_id, project)
    makes_project = named != projects.DEFAULT and not projects.list_projects(session, [named])
    config = json_safe(body.config or {})
    texts = {"versions": body.versions, "command": body.command, "folder": body.folder}
    if errors := find_outsized(config) or flaws({"config": config, **texts}):
        raise Invalid(errors)
    attempt = ingest.begin(
        session,
        sender,
        body.id,
        body.attempt,
        name=clean(body.name) or "watched",
        project=named,
        config=config,
        tags=", ".join(filter(None, (clean(tag.replace(",", " ")) for tag in body.tags))),
        started_at=body.started.timestamp(),
        host=body.host,
        versions=body.versions,
        command=body.command,
        folder=body.folder,
    )
    if known is None:
        with_it = f", and created its project {named}" if makes_project else ""
        text = f"a watched run began{with_it}"
        audit.record_now(session, request, sender, text, attempt.run_id)
    return Begun(
        run=attempt.run_id,
        attempt=attempt.attempt,
        sequence=attempt.sequence,
        offset=attempt.offset,
        sidecar_sequence=attempt.sidecar_sequence,
        sidecar_offset=attempt.sidecar_offset,
        page=f"/runs/{attempt.run_id}",
        created_project=named if makes_project and known is None else None,
    )


async def read_piece(request: Request) -> bytes:
    """Read the body before waiting for a turn, since a slow connection would occupy it."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise HTTPException(400, "The client disconnected.") from error


async def _piece(request: Request, _sender: Sender) -> bytes:
    return await read_piece(request)


#: OpenAPI description of the raw body.
OCTETS = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}
Piece = Annotated[bytes, Depends(_piece)]


async def _position(
    sender: Sender, run_id: RowId, attempt: RowId, sequence: Sequence, offset: Offset
) -> SpoolPosition:
    return SpoolPosition(sender, run_id, attempt, sequence, offset)


AtPosition = Annotated[SpoolPosition, Depends(_position)]


@router.put("/{run_id}/{attempt}/{sequence}", openapi_extra=OCTETS)
@unaudited(TELEMETRY)
async def send_spool(position: AtPosition, request: Request, body: Piece) -> Position:
    """Record a piece of `<attempt>-<sequence>.spool`, plain or gzip, from `offset` of it on.

    The response's offset is the end of the last complete frame. A higher sequence begins at 0.
    """
    return await _take(request, position, body)


@router.put("/{run_id}/{attempt}/sidecar/{sequence}", openapi_extra=OCTETS)
@unaudited(TELEMETRY)
async def send_sidecar_spool(position: AtPosition, request: Request, body: Piece) -> Position:
    """Record a piece of the spool of the attempt's sidecar: its log lines and system samples."""
    return await _take(request, position._replace(writer="sidecar"), body)


async def _take(request: Request, position: SpoolPosition, body: bytes) -> Position:
    state = request.app.state

    def work() -> int:
        piece, at_once = _unpack(request, body), state.shown_folder is not None
        return pieces.take_spool(state.database, position, piece, at_once=at_once)

    return Position(sequence=position.sequence, offset=await ingesting(request, work))


async def _file(
    sender: Sender,
    run_id: RowId,
    attempt: RowId,
    path: str,
    size: Annotated[int, Query(ge=0, le=LARGEST_COUNT, description="Of the whole file")],
    sha256: Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="Of the whole file")],
) -> FileUpload:
    return FileUpload(sender, run_id, attempt, path, size, sha256)


@router.put("/{run_id}/{attempt}/files/{path:path}", openapi_extra=OCTETS)
@unaudited(TELEMETRY)
async def send_file(
    file: Annotated[FileUpload, Depends(_file)],
    offset: Offset,
    request: Request,
    body: Piece,
    settings: TheSettings,
) -> FilePosition:
    """Upload a piece of a checkpoint or an artifact that the spool names, by its path there.

    Once the file is complete its SHA-256 is verified, and it can be downloaded.
    """

    def work() -> int:
        piece = _unpack(request, body)
        return take_file(settings, request.app.state.database, file, offset, piece)

    end = await ingesting(request, work)
    return FilePosition(offset=end, stored=end == file.size_bytes)


@router.post("/{run_id}/{attempt}/source")
@unaudited(TELEMETRY)
def describe(run_id: RowId, attempt: RowId, body: Source, session: Db, sender: Sender) -> Recorded:
    """Record git state, installed packages and source of an attempt, without secrets."""
    known = body.model_dump()
    if errors := flaws(known):
        raise Invalid(errors)
    texts = environments.Texts(body.source, body.diff, body.requirements)
    content = {"file": known["file"], "git": known["git"]}
    ingest.describe(session, sender, run_id, attempt, content, texts)
    return Recorded(run=run_id, status="recorded")


@router.post("/{run_id}/{attempt}/end")
def end(
    run_id: RowId, attempt: RowId, body: End, session: Db, sender: Sender, request: Request
) -> Recorded:
    """Record the end of an attempt's process. A later attempt may continue the run."""
    has_ended = ingest.end(
        session,
        sender,
        run_id,
        attempt,
        body.status,
        step=body.step,
        error=body.error,
        exit_code=body.exit_code,
        preemption=clean(body.preemption or ""),
        lost_bytes=body.lost_bytes or 0,
    )
    if has_ended:
        audit.record_now(session, request, sender, f"the process has ended: {body.status}", run_id)
    return Recorded(run=run_id, status=body.status)


def _unpack(request: Request, body: bytes) -> bytes:
    return pieces.unpack(body, request.headers.get("content-encoding", ""))
