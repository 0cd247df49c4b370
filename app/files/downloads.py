"""Downloads of checkpoints and artifacts, as a whole or a range, in chunks.

An interrupted download resumes with Range and If-Range: the ETag is the file's SHA-256. From a
bucket it is one request passed through or, as a setting, a redirect to a presigned URL.
"""

import logging
import re
from collections.abc import Iterator
from hashlib import sha256
from operator import itemgetter
from typing import TYPE_CHECKING

import obstore
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from obstore.store import ObjectStore

from app.auth.authentication import SignedIn
from app.auth.routing import Router
from app.dependencies import Db, TheDatabase, TheSettings
from app.files.file_names import artifact_name, file_name, log_name
from app.http.active_requests import DOWNLOAD
from app.http.parameters import RowId, RunId
from app.live.live_log import live_parts
from db.access.permissions import Permission
from db.errors import NotFound, StorageUnreachable
from db.files import artifacts, checkpoints
from db.files.object_store import is_own, open_store, sign_address, why
from db.files.storage import Stored
from db.runs import runs
from db.settings import Settings

if TYPE_CHECKING:
    from obstore import GetResult

router = Router()
logger = logging.getLogger(__name__)

#: Seconds to retry a store that does not answer, before the error.
RETRY_SECONDS = 5.0
#: Seconds for which a presigned URL is valid.
SIGNED_SECONDS = 300.0

CHUNK_BYTES = 1 << 20
OCTETS = "application/octet-stream"
#: Media types of artifacts: none that a browser would execute, whatever the recipe claims.
MEDIA_TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "txt": "text/plain; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "ogg": "video/ogg",
}
#: A script's document is shown only in a frame of a page, with its styles: it has no origin, and
#: runs nothing.
DOCUMENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; sandbox; "
    "frame-ancestors 'self'"
)

PATH = "/runs/{run_id}/checkpoints/{checkpoint_id}/download"


@router.head(PATH, include_in_schema=False)
@router.get(
    PATH, Permission.DOWNLOAD_FILES, lasts=DOWNLOAD, response_class=Response, tags=["checkpoints"]
)
def download(
    request: Request,
    run_id: RunId,
    checkpoint_id: RowId,
    session: Db,
    settings: TheSettings,
    _principal: SignedIn,
) -> Response:
    """Download a checkpoint or its weights. Takes Range, If-Range and If-None-Match.

    With presigned downloads, the response is 307 to a URL that is valid for five minutes.
    """
    run, row = runs.get(session, run_id), checkpoints.get(session, run_id, checkpoint_id)
    redirects = settings.presigned_downloads and request.method == "GET"
    return send(request, settings, row, file_name(run, row), {}, redirects=redirects)


ARTIFACT_PATH = "/runs/{run_id}/artifacts/{artifact_id}/download"


@router.head(ARTIFACT_PATH, include_in_schema=False)
@router.get(
    ARTIFACT_PATH,
    Permission.DOWNLOAD_FILES,
    lasts=DOWNLOAD,
    response_class=Response,
    tags=["artifacts"],
)
def download_artifact(
    request: Request,
    run_id: RunId,
    artifact_id: RowId,
    session: Db,
    settings: TheSettings,
    _principal: SignedIn,
) -> Response:
    """Download an artifact. Takes Range, If-Range and If-None-Match."""
    run, row = runs.get(session, run_id), artifacts.get(session, run_id, artifact_id)
    suffix = row.name.rpartition(".")[2].lower()
    headers = {
        "Content-Type": MEDIA_TYPES.get(suffix, OCTETS),
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    if suffix == "html" and request.headers.get("sec-fetch-dest") == "iframe":
        headers |= {"Content-Security-Policy": DOCUMENT_POLICY, "Content-Disposition": "inline"}
        headers["Content-Type"] = "text/html; charset=utf-8"
    return send(request, settings, row, artifact_name(run, row), headers)


LOG_PATH = "/runs/{run_id}/log/download"


@router.get(
    LOG_PATH, Permission.DOWNLOAD_FILES, lasts=DOWNLOAD, response_class=Response, tags=["runs"]
)
def download_log(
    run_id: RunId, session: Db, settings: TheSettings, database: TheDatabase
) -> StreamingResponse:
    """Download the whole log of a run, gzipped.

    For a run in training on another machine, the last five minutes, or the last twentieth of its
    time, are not included yet.
    """
    run = runs.get(session, run_id)
    live = live_parts(settings, run_id)
    with database.reading() as later:  # a newer snapshot: parts deleted since then have rows there
        rows = artifacts.log_files(later, run_id)
    published = {row.name for row in rows}
    for part in live:
        if part.name in published or not part.size:
            part.file.close()
    live = [part for part in live if not part.file.closed]
    if not rows and not live:
        text = (
            "has no log file: it has printed nothing, or the first part of the log is not complete "
            "yet."
        )
        raise NotFound(f"Run {run_id} {text}")
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    for row in rows:
        _check(store, row)
    headers = {
        "Cache-Control": "no-store",
        "Content-Disposition": f'attachment; filename="{log_name(run)}"',
    }
    if not live:
        headers["Content-Length"] = str(sum(row.size_bytes for row in rows))
    pieces = [*((row.name, _whole(store, row.key)) for row in rows)]
    pieces += [(part.name, part.compress()) for part in live]
    pieces.sort(key=itemgetter(0))
    chunks = (chunk for _name, piece in pieces for chunk in piece)
    return StreamingResponse(chunks, headers=headers, media_type="application/gzip")


def _whole(store: ObjectStore, key: str) -> Iterator[bytes]:
    for chunk in obstore.get(store, key).stream(min_chunk_size=CHUNK_BYTES):
        yield bytes(chunk)


def send(
    request: Request,
    settings: Settings,
    row: Stored,
    name: str,
    more_headers: dict[str, str],
    *,
    redirects: bool = False,
) -> Response:
    """Send a stored file, or the requested range of it."""
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    size, etag = row.size_bytes, f'"{row.sha256}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-store",
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Type": OCTETS,
    } | more_headers
    if etag in _etags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    # A resume with our ETag is not redirected: the bucket has another ETag for the file.
    if redirects and request.headers.get("if-range") != etag:
        _check(store, row)
        if address := sign_address(store, row.key, seconds=SIGNED_SECONDS):
            return Response(status_code=307, headers=headers | {"Location": address})
    byte_range, status = range(size), 200
    if request.headers.get("if-range", etag) == etag:
        # An empty file has no ranges: it is sent in full.
        part = parse_range(request.headers.get("range", ""), size) if size else None
        if part == "unsatisfiable":
            headers["Content-Range"] = f"bytes */{size}"
            return Response(status_code=416, headers=headers)
        if isinstance(part, range):
            byte_range, status = part, 206
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    headers["Content-Length"] = str(len(byte_range))
    if request.method == "HEAD":
        _check(store, row)
        return Response(status_code=status, headers=headers)
    chunks = map(bytes, _open(store, row, byte_range).stream(min_chunk_size=CHUNK_BYTES))
    if len(byte_range) < size:
        return StreamingResponse(chunks, status, headers)
    whole = _verified(row, chunks)
    if size > CHUNK_BYTES:
        return StreamingResponse(whole, status, headers)
    return Response(b"".join(whole), status, headers)


def _verified(row: Stored, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a whole file; the last one only if its SHA-256 is the recorded one.

    Otherwise the download ends incomplete. Raises NotFound.
    """
    digest, previous = sha256(), b""
    for chunk in chunks:
        digest.update(chunk)
        if previous:
            yield previous
        previous = chunk
    if digest.hexdigest() != row.sha256:
        logger.error("%s is damaged: its SHA-256 differs from the recorded one", row.key)
        raise NotFound(f"The file {row.key} is damaged: its SHA-256 differs from the recorded one.")
    yield previous


def parse_range(header: str, size: int) -> range | str | None:
    """Return the bytes that a Range header requests, "unsatisfiable", or None for all of them.

    Only a single range is supported; RFC 9110 lets a server ignore others.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if match is None or match.group() == "bytes=-":
        return None
    start, end = (_position(digits) if digits else None for digits in match.groups())
    if start is None:
        length = min(end or 0, size)
        return range(size - length, size) if length else "unsatisfiable"
    if end is not None and end < start:
        return None
    if start >= size:
        return "unsatisfiable"
    return range(start, size if end is None else min(end + 1, size))


def _position(digits: str) -> int:
    """Parse a byte position; one with too many digits is beyond the end of every file."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) < 19 else 10**18


def _open(store: ObjectStore, row: Stored, byte_range: range) -> "GetResult":
    """Open these bytes of a file; a missing or truncated file is an error.

    Raises NotFound, StorageUnreachable.
    """
    _check_own(store, row)
    try:
        part = (byte_range.start, byte_range.stop)
        result = obstore.get(store, row.key, options={"range": part} if len(byte_range) else {})
    except (FileNotFoundError, obstore.exceptions.BaseError) as error:
        _check(store, row)  # a truncated file may not have the range
        raise _unreachable(row, error) from error
    _check_size(row, result.meta["size"])
    return result


def _check(store: ObjectStore, row: Stored) -> None:
    """Check that the store has the complete file. Raises NotFound, StorageUnreachable."""
    _check_own(store, row)
    try:
        _check_size(row, obstore.head(store, row.key)["size"])
    except FileNotFoundError as error:
        raise _missing_file(row) from error
    except obstore.exceptions.BaseError as error:
        raise _unreachable(row, error) from error


def _check_own(store: ObjectStore, row: Stored) -> None:
    if not row.key and row.path:
        text = "is only on the training machine: it was not uploaded."
        raise NotFound(f"The file {row.path[:200]} {text}")
    if not is_own(store, row.key):
        raise _missing_file(row)


def _check_size(row: Stored, size_bytes: int) -> None:
    if size_bytes != row.size_bytes:
        text = f"The file {row.key} is damaged: it has {size_bytes} bytes, not the recorded "
        raise NotFound(f"{text}{row.size_bytes}.")


def _missing_file(row: Stored) -> NotFound:
    return NotFound(f"The file {row.key} is no longer in the store.")


def _unreachable(row: Stored, error: Exception) -> StorageUnreachable:
    # Location and error of the bucket are only logged, not sent to clients.
    logger.warning("%s: %s", row.key, why(error))
    return StorageUnreachable()


def _etags(header: str) -> list[str]:
    return [etag.strip().removeprefix("W/") for etag in header.split(",")]
