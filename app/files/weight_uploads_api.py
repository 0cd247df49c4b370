"""Route for uploading initial weights."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import Path, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.auth import audit
from app.auth.authentication import Uploader
from app.auth.permissions import ANY_SUBMITTER
from app.auth.routing import Router
from app.dependencies import TheSettings, ingesting
from app.files.weight_uploads import Stored, Upload
from db.access.permissions import Permission
from db.database import Database
from db.files import uploads
from db.tables import User

router = Router(tags=["runs"])

#: Bytes per write: a thread for each packet would cost more than the packet.
PIECE_BYTES = 1 << 20


class Uploaded(BaseModel):
    """A file that runs can start from; unused ones are deleted after a day."""

    upload: Annotated[str, Field(description="Value for `weights.upload` of a configuration")]
    size_bytes: int
    sha256: str


@router.put(
    "/uploads/{name:path}",
    ANY_SUBMITTER,
    token_permission=Permission.SUBMIT_RUN,
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def upload_weights(
    name: Annotated[str, Path(max_length=1000, description="Ends in .safetensors or .pt")],
    request: Request,
    settings: TheSettings,
    user: Uploader,
) -> Uploaded:
    """Upload a weights file as the body. An aborted upload is discarded."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < 19 else 0
    with Upload(settings, name, size) as file:
        async for piece in _pieces(request):
            await ingesting(request, partial(file.add, piece))
        stored = await ingesting(request, file.keep)
    await ingesting(request, partial(_note, request, user, stored))
    return Uploaded(**stored._asdict())


def _note(request: Request, user: User, stored: Stored) -> None:
    database: Database = request.app.state.database
    project = getattr(request.state, "token_project", None)
    with database.writing() as session:
        uploads.record(session, user, stored.upload, stored.size_bytes, project)
        audit.record_now(session, request, user, f"{stored.upload}, {stored.size_bytes:,} bytes")


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces, with at most one piece in memory."""
    piece = bytearray()
    try:
        async for packet in request.stream():
            piece += packet
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    except ClientDisconnect as error:
        raise HTTPException(400, "The client disconnected.") from error
    if piece:
        yield bytes(piece)
