"""Uploads of images for notes and reports: stored as files of the run or of the report.

The body is the image. Its type is read from its content, and it is stored encoded again.
"""

from functools import partial
from typing import Annotated

import obstore
from fastapi import Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from app.artifacts.artifact_uploads import BlobUpload
from app.auth import audit
from app.auth.authentication import Uploader
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import resolve
from app.auth.routing import Router
from app.dependencies import TheSettings
from app.files.downloads import RETRY_SECONDS
from app.files.file_uploads import take_file
from app.files.image_encoding import MEDIA_TYPES, EncodedImage, encode_again
from app.http.active_requests import Queue
from app.http.parameters import RowId, RunId, Text
from app.reports.reports import writable
from db.access import permissions
from db.access.permissions import Permission
from db.database import Database
from db.errors import HalfstepError, NotFound, StorageUnreachable
from db.files import artifact_versions, artifacts, report_images
from db.files.object_store import delete_file, is_full, open_store, storage_full
from db.queue import quotas
from db.runs import runs
from db.settings import Settings
from db.tables import User
from halfstep.artifacts.manifest import Entry

router = Router(tags=["reports"])

#: Name of the artifact with the images of a project's note.
NOTE_IMAGES = "note-images"
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}}
            for media_type in MEDIA_TYPES.values()
        },
    }
}


async def _encode(request: Request, _user: Uploader) -> EncodedImage:
    """Read the body and encode the image again; few at once, for their memory."""
    content = await request.body()
    queue: Queue = request.app.state.encoding
    async with queue.turn():
        return await run_in_threadpool(encode_again, content)


Encoded = Annotated[EncodedImage, Depends(_encode)]


class UploadedImage(BaseModel):
    """An image for notes or a report."""

    address: Annotated[str, Field(description="For Markdown, as ![text](address)")]
    media_type: str
    size_bytes: int
    sha256: str


@router.post("/runs/{run_id}/images", Permission.CONTROL_RUN, status_code=201, openapi_extra=BODY)
async def upload_run_image(
    run_id: RunId, request: Request, settings: TheSettings, user: Uploader, image: Encoded
) -> UploadedImage:
    """Store an image for the note of a run: PNG, JPEG, GIF or WebP, as an artifact."""
    return await run_in_threadpool(partial(_store_of_run, request, settings, user, run_id, image))


@router.post(
    "/reports/{report_id}/images",
    SIGNED_IN,
    token_permission=Permission.SUBMIT_RUN,
    status_code=201,
    openapi_extra=BODY,
)
async def upload_report_image(
    report_id: RowId, request: Request, settings: TheSettings, user: Uploader, image: Encoded
) -> UploadedImage:
    """Store an image for a report: PNG, JPEG, GIF or WebP."""
    work = partial(_store_of_report, request, settings, user, report_id, image)
    return await run_in_threadpool(work)


@router.post(
    "/projects/images",
    SIGNED_IN,
    token_permission=Permission.SUBMIT_RUN,
    status_code=201,
    openapi_extra=BODY,
)
async def upload_project_image(
    request: Request,
    settings: TheSettings,
    user: Uploader,
    image: Encoded,
    project: Annotated[Text, Query(description="Empty: the first project")] = "",
) -> UploadedImage:
    """Store an image for the note of a project: PNG, JPEG, GIF or WebP, as an artifact."""
    work = partial(_store_of_project, request, settings, user, project, image)
    return await run_in_threadpool(work)


def _store_of_run(
    request: Request, settings: Settings, user: User, run_id: int, image: EncodedImage
) -> UploadedImage:
    database: Database = request.app.state.database
    sha256, size_bytes = image.sha256, len(image.content)
    with database.reading() as session:
        quotas.check_storage(session, runs.get(session, run_id).project, size_bytes)
    key = f"runs/{run_id}/artifacts/{sha256}"
    _put(settings, key, image.content)
    with database.writing() as session:
        name = f"note/{sha256[:16]}.{image.ending}"
        row = artifacts.attach(session, run_id, name, key=key, size_bytes=size_bytes, sha256=sha256)
        audit.record_now(session, request, user, f"{name}, {size_bytes:,} bytes", run_id)
        address = f"/runs/{run_id}/artifacts/{row.id}/download"
    return _describe_image(address, image)


def _store_of_report(
    request: Request, settings: Settings, user: User, report_id: int, image: EncodedImage
) -> UploadedImage:
    database: Database = request.app.state.database
    sha256, size_bytes = image.sha256, len(image.content)
    with database.reading() as session:
        permissions.limit(session, permissions.grants(session, user))
        project = writable(session, report_id).project
        if getattr(request.state, "token_project", None) not in (None, project):
            raise NotFound(f"There is no report {report_id}.")
        if report_images.find(session, report_id, sha256) is None:
            report_images.check_room(session, report_id)
            quotas.check_storage(session, project, size_bytes)
    key = f"reports/{report_id}/{sha256}"
    _put(settings, key, image.content)
    try:
        with database.writing() as session:
            quotas.lock_limits(session, project)
            row = report_images.record(
                session,
                user,
                report_id,
                sha256=sha256,
                media_type=image.media_type,
                size_bytes=size_bytes,
            )
            quotas.check_storage(session, project, 0)
            audit.record_now(session, request, user, f"image {row.id}, {size_bytes:,} bytes")
            address = f"/reports/{report_id}/images/{row.id}"
    except HalfstepError:  # report or project were filled, or the report deleted, meanwhile
        with database.reading() as session:
            is_recorded = report_images.find(session, report_id, sha256) is not None
        if not is_recorded:
            delete_file(open_store(settings, retry_seconds=RETRY_SECONDS), key)
        raise
    return _describe_image(address, image)


def _store_of_project(
    request: Request, settings: Settings, user: User, project: str, image: EncodedImage
) -> UploadedImage:
    database: Database = request.app.state.database
    sha256, size_bytes = image.sha256, len(image.content)
    entry = Entry(f"{sha256[:16]}.{image.ending}", size_bytes, sha256)
    with database.writing() as session:
        permissions.limit(session, request.state.grants)
        resolve(session, Permission.SUBMIT_RUN, project)
        if not artifact_versions.find_known_blobs(session, project, {sha256}):
            quotas.check_storage(session, project, size_bytes)
        version_id = artifact_versions.save(
            session, user, project, NOTE_IMAGES, type="image", entries=[entry]
        ).id
        audit.record_now(session, request, user, f"{entry.path}, {size_bytes:,} bytes")
    upload = BlobUpload(request.state.grants, version_id, size_bytes, sha256)
    take_file(settings, database, upload, 0, image.content)
    address = f"/api/v1/artifact-versions/{version_id}/files/{entry.path}"
    return _describe_image(address, image)


def _describe_image(address: str, image: EncodedImage) -> UploadedImage:
    return UploadedImage(
        address=address,
        media_type=image.media_type,
        size_bytes=len(image.content),
        sha256=image.sha256,
    )


def _put(settings: Settings, key: str, content: bytes) -> None:
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    try:
        obstore.put(store, key, content)
    except (OSError, obstore.exceptions.BaseError) as error:
        if is_full(error):
            raise storage_full(settings.data, len(content)) from error
        raise StorageUnreachable from error
