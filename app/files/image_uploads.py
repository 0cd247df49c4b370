"""Uploads of images for notes and reports: stored as files of the run or of the report.

The body is the image. Its type is read from its content, and no other type than these is stored.
"""

import hashlib
from functools import partial
from typing import Annotated

import obstore
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from app.artifacts.artifact_uploads import BlobUpload
from app.auth import audit
from app.auth.authentication import Uploader
from app.auth.permissions import SIGNED_IN, requires
from app.auth.project_parameters import resolve
from app.dependencies import TheSettings
from app.files.downloads import RETRY_SECONDS
from app.files.file_uploads import take_file
from app.http.parameters import RowId, RunId, Text
from app.reports.reports import writable
from db.access import permissions
from db.access.permissions import Permission
from db.database import Database
from db.errors import HalfstepError, Invalid, NotFound, StorageUnreachable
from db.files import artifact_versions, artifacts, report_images
from db.files.storage import delete_file, is_full, open_store, storage_full
from db.queue import quotas
from db.runs import runs
from db.settings import Settings
from db.tables import User
from halfstep.artifacts.manifest import Entry

router = APIRouter(tags=["reports"])

#: Ending of a file by the media type of its content.
ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
#: Name of the artifact with the images of a project's note.
NOTE_IMAGES = "note-images"
BODY = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ENDINGS},
    }
}


class UploadedImage(BaseModel):
    """An image for notes or a report."""

    address: Annotated[str, Field(description="For Markdown, as ![text](address)")]
    media_type: str
    size_bytes: int
    sha256: str


@router.post("/runs/{run_id}/images", status_code=201, openapi_extra=BODY)
@requires(Permission.CONTROL_RUN)
async def upload_run_image(
    run_id: RunId, request: Request, settings: TheSettings, user: Uploader
) -> UploadedImage:
    """Store an image for the note of a run: PNG, JPEG, GIF or WebP, as an artifact."""
    content = await request.body()
    return await run_in_threadpool(partial(_store_of_run, request, settings, user, run_id, content))


@router.post("/reports/{report_id}/images", status_code=201, openapi_extra=BODY)
@requires(SIGNED_IN, token_permission=Permission.SUBMIT_RUN)
async def upload_report_image(
    report_id: RowId, request: Request, settings: TheSettings, user: Uploader
) -> UploadedImage:
    """Store an image for a report: PNG, JPEG, GIF or WebP."""
    content = await request.body()
    work = partial(_store_of_report, request, settings, user, report_id, content)
    return await run_in_threadpool(work)


@router.post("/projects/images", status_code=201, openapi_extra=BODY)
@requires(SIGNED_IN, token_permission=Permission.SUBMIT_RUN)
async def upload_project_image(
    request: Request,
    settings: TheSettings,
    user: Uploader,
    project: Annotated[Text, Query(description="Empty: the first project")] = "",
) -> UploadedImage:
    """Store an image for the note of a project: PNG, JPEG, GIF or WebP, as an artifact."""
    content = await request.body()
    work = partial(_store_of_project, request, settings, user, project, content)
    return await run_in_threadpool(work)


def media_type_of(content: bytes) -> str:
    """Return the media type of an image by its first bytes. Raises Invalid."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "image/webp"
    text = "it is empty" if not content else f"it begins with {content[:8]!r}"
    raise Invalid({"body": f"{text}; allowed: an image in PNG, JPEG, GIF or WebP"})


def _store_of_run(
    request: Request, settings: Settings, user: User, run_id: int, content: bytes
) -> UploadedImage:
    database: Database = request.app.state.database
    kind, sha256 = media_type_of(content), hashlib.sha256(content).hexdigest()
    with database.reading() as session:
        quotas.check_storage(session, runs.get(session, run_id).project, len(content))
    key = f"runs/{run_id}/artifacts/{sha256}"
    _put(settings, key, content)
    with database.writing() as session:
        name = f"note/{sha256[:16]}.{ENDINGS[kind]}"
        row = artifacts.attach(
            session, run_id, name, key=key, size_bytes=len(content), sha256=sha256
        )
        audit.record_now(session, request, user, f"{name}, {len(content):,} bytes", run_id)
        address = f"/runs/{run_id}/artifacts/{row.id}/download"
    return UploadedImage(address=address, media_type=kind, size_bytes=len(content), sha256=sha256)


def _store_of_report(
    request: Request, settings: Settings, user: User, report_id: int, content: bytes
) -> UploadedImage:
    database: Database = request.app.state.database
    kind, sha256 = media_type_of(content), hashlib.sha256(content).hexdigest()
    with database.reading() as session:
        permissions.limit(session, permissions.grants(session, user))
        project = writable(session, report_id).project
        if getattr(request.state, "token_project", None) not in (None, project):
            raise NotFound(f"There is no report {report_id}.")
        if report_images.find(session, report_id, sha256) is None:
            report_images.check_room(session, report_id)
            quotas.check_storage(session, project, len(content))
    key, size_bytes = f"reports/{report_id}/{sha256}", len(content)
    _put(settings, key, content)
    try:
        with database.writing() as session:
            quotas.lock_limits(session, project)
            image = report_images.record(
                session, user, report_id, sha256=sha256, media_type=kind, size_bytes=size_bytes
            )
            quotas.check_storage(session, project, 0)
            audit.record_now(session, request, user, f"image {image.id}, {size_bytes:,} bytes")
            address = f"/reports/{report_id}/images/{image.id}"
    except HalfstepError:  # report or project were filled, or the report deleted, meanwhile
        with database.reading() as session:
            is_recorded = report_images.find(session, report_id, sha256) is not None
        if not is_recorded:
            delete_file(open_store(settings, retry_seconds=RETRY_SECONDS), key)
        raise
    return UploadedImage(address=address, media_type=kind, size_bytes=size_bytes, sha256=sha256)


def _store_of_project(
    request: Request, settings: Settings, user: User, project: str, content: bytes
) -> UploadedImage:
    database: Database = request.app.state.database
    kind, sha256 = media_type_of(content), hashlib.sha256(content).hexdigest()
    entry = Entry(f"{sha256[:16]}.{ENDINGS[kind]}", len(content), sha256)
    with database.writing() as session:
        permissions.limit(session, request.state.grants)
        resolve(session, Permission.SUBMIT_RUN, project)
        if not artifact_versions.known_blobs(session, project, {sha256}):
            quotas.check_storage(session, project, len(content))
        version_id = artifact_versions.save(
            session, user, project, NOTE_IMAGES, type="image", entries=[entry]
        ).id
        audit.record_now(session, request, user, f"{entry.path}, {len(content):,} bytes")
    upload = BlobUpload(request.state.grants, version_id, len(content), sha256)
    take_file(settings, database, upload, 0, content)
    address = f"/api/v1/artifact-versions/{version_id}/files/{entry.path}"
    return UploadedImage(address=address, media_type=kind, size_bytes=len(content), sha256=sha256)


def _put(settings: Settings, key: str, content: bytes) -> None:
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    try:
        obstore.put(store, key, content)
    except (OSError, obstore.exceptions.BaseError) as error:
        if is_full(error):
            raise storage_full(settings.data, len(content)) from error
        raise StorageUnreachable from error
