"""Reports: pages of Markdown with panels of runs, per project."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete as delete_rows
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from db import clock
from db.access import projects
from db.clock import now
from db.errors import Changed, Conflict, Invalid, NotFound
from db.names import clean
from db.paging import Page, page
from db.tables import NOT_DELETED, Report, ReportImage, Run, SharedLink, User

#: Length limits in characters.
LENGTHS = {"title": 200, "text": 100_000}
#: Limit of reports per project, without those in the trash.
MOST = 2000
DAY_SECONDS = 86_400.0
_IS_LISTED = Report.deleted_at.is_(None)


@dataclass(frozen=True)
class Content:
    """The content of a report. panels: see `Report.panels`, without their editors."""

    title: str
    text: str
    panels: list[dict[str, Any]]


def list_reports(
    session: Session, names: Collection[str] | None = None, *, after: str = "", limit: int
) -> Page:
    """Return a page of reports, newest first, with the names of their authors and last editors.

    names: only those of these projects.
    """
    editor = aliased(User)
    query = select(Report, User.name, editor.name).join(User, User.id == Report.user_id)
    query = query.join(editor, editor.id == Report.editor_id).where(_IS_LISTED)
    if names is not None:
        query = query.where(Report.project.in_(names))
    return page(session, query, (Report.id,), after=after, limit=limit, newest_first=True)


def get(session: Session, report_id: int, *, lock: bool = False) -> Report:
    """Return a report. lock: against other writers. Raises NotFound."""
    report = _row(session, report_id, lock=lock)
    if report.deleted_at is not None:
        raise NotFound(f"Report {report_id} is in the trash, where it can be restored.")
    return report


def create(session: Session, user: User, project: str, content: Content) -> Report:
    """Create a report in a project. Raises Invalid."""
    checked = _check(content)
    projects.lock_shared(session, project)
    in_project = select(func.count()).where(Report.project == project, _IS_LISTED)
    if (session.scalar(in_project) or 0) >= MOST:
        raise Invalid({"project": f"it has {MOST:,} reports, the maximum; delete some first"})
    report = Report(project=project, user_id=user.id, editor_id=user.id, version=1, **vars(checked))
    report.panels = _with_editors(checked.panels, user, [])
    session.add(report)
    session.flush()
    return report


def edit(session: Session, report_id: int, user: User, content: Content, *, version: int) -> Report:
    """Replace the content of a report.

    version: the one that the author edited. Raises Invalid, NotFound, or Changed if there is a
    newer one with other content.
    """
    checked = _check(content)
    report = get(session, report_id, lock=True)
    if (report.title, report.text) == (checked.title, checked.text):
        return report
    if report.version != version:
        text = f"Report {report_id} has version {report.version}, not {version}"
        raise Changed(f"{text}: another user has changed it, and nothing is saved.")
    report.title, report.text = checked.title, checked.text
    report.panels = _with_editors(checked.panels, user, report.edited_panels)
    report.version += 1
    report.editor_id = user.id
    report.changed_at = clock.current(session)
    session.flush()
    return report


def delete(session: Session, report_id: int) -> Report:
    """Move a report to the trash; its links show nothing until it is restored. Idempotent."""
    report = _row(session, report_id, lock=True)
    if report.deleted_at is None:
        report.deleted_at = clock.current(session)
    return report


def restore(session: Session, report_id: int) -> Report:
    """Restore a report from the trash. Idempotent. Raises Conflict if it is being erased."""
    report = _row(session, report_id, lock=True)
    if report.erasing:
        raise Conflict(f"Report {report_id} is being deleted permanently.")
    report.deleted_at = None
    return report


def erase(session: Session, report_id: int) -> Report:
    """Mark a report in the trash for immediate erasure. Raises Conflict if it is not there."""
    report = _row(session, report_id, lock=True)
    if report.deleted_at is None:
        raise Conflict(f"Report {report_id} is not in the trash: delete it first.")
    report.erasing = True
    return report


def list_deleted(session: Session, *, limit: int) -> Sequence[Report]:
    """List the reports in the trash, newest first."""
    query = select(Report).where(Report.deleted_at.is_not(None), ~Report.erasing)
    return session.scalars(query.order_by(Report.id.desc()).limit(limit)).all()


def due(session: Session, days: float) -> list[int]:
    """Return the reports in the trash that are to be erased now."""
    is_over = or_(Report.erasing, Report.deleted_at <= now() - days * DAY_SECONDS)
    query = select(Report.id).where(Report.deleted_at.is_not(None), is_over)
    return list(session.scalars(query.order_by(Report.id)))


def begin_erasure(session: Session, report_id: int) -> bool:
    """Mark a report that is due, unless it has been restored in the meantime."""
    report = session.get(Report, report_id, with_for_update=True)
    if report is None or report.deleted_at is None:
        return False
    report.erasing = True
    return True


def erase_rows(session: Session, report_id: int) -> None:
    """Delete the rows of a report, whose files are deleted already."""
    for table in (ReportImage, SharedLink):
        session.execute(delete_rows(table).where(table.report_id == report_id))
    session.execute(delete_rows(Report).where(Report.id == report_id))


def drawn(session: Session, run_ids: Collection[int]) -> tuple[dict[int, Run], set[int]]:
    """Return the visible runs among these by id, and the ids of those that are deleted."""
    visible = session.scalars(select(Run).where(Run.id.in_(run_ids), NOT_DELETED))
    gone = select(Run.id).where(Run.id.in_(run_ids), ~NOT_DELETED)
    return {run.id: run for run in visible}, set(session.scalars(gone))


def _with_editors(
    panels: Sequence[dict[str, Any]], user: User, before: Sequence[dict[str, Any]]
) -> list[dict[str, object]]:
    """Return panels with the users who chose their runs.

    An unchanged panel keeps its editors. In a changed one a run has also those that it had before:
    it comes into no link by the edit of another user.
    """
    editors: dict[str, set[int]] = {}
    for panel in before:
        for run_id, users in panel["editors"].items():
            editors.setdefault(run_id, set()).update(users)
    unchanged = [panel | {"editors": {}} for panel in before]
    edited = []
    for panel in panels:
        if panel | {"editors": {}} in unchanged:
            edited.append(before[unchanged.index(panel | {"editors": {}})])
        else:
            its = {key: sorted({*editors.get(key, ()), user.id}) for key in map(str, panel["runs"])}
            edited.append(panel | {"editors": its})
    return edited


def _row(session: Session, report_id: int, *, lock: bool = False) -> Report:
    report = session.get(Report, report_id, with_for_update=lock or None)
    if report is None:
        raise NotFound(f"There is no report {report_id}.")
    return report


def _check(content: Content) -> Content:
    title, text = clean(content.title), content.text.replace("\r\n", "\n").rstrip()
    errors = {}
    if not title:
        errors["title"] = f"it is empty; allowed: 1 to {LENGTHS['title']} characters"
    for name, value in (("title", title), ("text", text)):
        if len(value) > LENGTHS[name]:
            most = f"allowed: at most {LENGTHS[name]:,}"
            errors[name] = f"{len(value):,} characters; {most}"
    if errors:
        raise Invalid(errors)
    return Content(title, text, content.panels)
