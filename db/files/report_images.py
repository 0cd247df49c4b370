"""Images of reports: their rows, and their files in the store."""

import obstore
from obstore.store import ObjectStore
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.errors import Invalid, NotFound
from db.files.object_store import PAGE_FILES, delete_files
from db.runs import reports
from db.tables import ReportImage, User

#: Limit of images per report.
MOST = 100


def get(session: Session, report_id: int, image_id: int) -> ReportImage:
    """Return an image of a report. Raises NotFound."""
    image = session.get(ReportImage, image_id)
    if image is None or image.report_id != report_id:
        raise NotFound(f"Report {report_id} has no image {image_id}.")
    return image


def find(session: Session, report_id: int, sha256: str) -> ReportImage | None:
    """Return the image of a report with this content."""
    of_report = (ReportImage.report_id == report_id, ReportImage.sha256 == sha256)
    return session.scalar(select(ReportImage).where(*of_report))


def check_room(session: Session, report_id: int) -> None:
    """Check that a report may have one more image. Raises Invalid."""
    count = select(func.count()).where(ReportImage.report_id == report_id)
    if (session.scalar(count) or 0) >= MOST:
        raise Invalid({"image": f"the report has {MOST} images, the maximum"})


def record(
    session: Session, user: User, report_id: int, *, sha256: str, media_type: str, size_bytes: int
) -> ReportImage:
    """Record an image whose file is stored; the same one is recorded once.

    The report is locked until the commit. Raises Invalid, NotFound.
    """
    reports.get(session, report_id, lock=True)
    if (image := find(session, report_id, sha256)) is not None:
        return image
    check_room(session, report_id)
    image = ReportImage(
        report_id=report_id,
        sha256=sha256,
        media_type=media_type,
        size_bytes=size_bytes,
        user_id=user.id,
    )
    session.add(image)
    session.flush()
    return image


def delete_of_report(store: ObjectStore, report_id: int) -> None:
    """Delete the files of all images of a report."""
    prefix = f"reports/{report_id}/"
    for page in obstore.list(store, prefix=prefix, chunk_size=PAGE_FILES):
        delete_files(store, [meta["path"] for meta in page if meta["path"].startswith(prefix)])
