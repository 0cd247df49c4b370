"""Images of reports, sent so that a browser shows them and does nothing else with them."""

import obstore
from fastapi import Response

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, TheSettings
from app.files.downloads import RETRY_SECONDS
from app.http.parameters import RowId
from db.errors import NotFound, StorageUnreachable
from db.files import report_images
from db.files.object_store import open_store
from db.runs import reports
from db.settings import Settings
from db.tables import ReportImage

router = Router()

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Content-Disposition": "inline",
    "Cache-Control": "private, max-age=3600",
}


@router.get(
    "/reports/{report_id}/images/{image_id}", SIGNED_IN, response_class=Response, tags=["reports"]
)
def download_image(
    report_id: RowId, image_id: RowId, session: Db, settings: TheSettings
) -> Response:
    """Return an image of a report."""
    reports.get(session, report_id)
    return send_image(settings, report_images.get(session, report_id, image_id))


def send_image(settings: Settings, image: ReportImage) -> Response:
    """Return the response with an image, which is small. Raises NotFound, StorageUnreachable."""
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    try:
        content = bytes(obstore.get(store, image.key).bytes())
    except FileNotFoundError as error:
        raise NotFound(f"The file {image.key} is no longer in the store.") from error
    except obstore.exceptions.BaseError as error:
        raise StorageUnreachable from error
    headers = HEADERS | {"ETag": f'"{image.sha256}"'}
    return Response(content, media_type=image.media_type, headers=headers)
