"""Uploaded reports of `halfstep check`: validation and permission checks."""

from collections.abc import Mapping

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
from app.http.parameters import NAME_CHARACTERS, flaws, nonfinite
from db.access.permissions import Grants, Permission
from db.errors import Invalid
from db.tables import LARGEST_ID, CheckReport
from halfstep.check.report import (
    MOST_FILES,
    MOST_LINES,
    MOST_ROWS,
    Report,
    as_content,
    from_content,
)
from halfstep.telemetry.plain_json import JsonObject, unplain

#: Required to upload reports to a project.
WRITE = Permission.SUBMIT_RUN
ACTION = "upload checks to"


def parse_report(report: JsonObject, sources: Mapping[str, str]) -> Report:
    """Return a report that is to be stored. Raises Invalid."""
    errors = flaws(dict(sources), "sources") | nonfinite(report, "report")
    if (problem := unplain(report)) is not None:
        errors["report"] = problem
    if errors:
        raise Invalid(errors)
    try:
        content = from_content(report)
    except ValueError as error:
        raise Invalid({"report": str(error)}) from error
    lines = sum(text.count("\n") + 1 for text in sources.values())
    limits = (
        ("report.steps", content.steps, LARGEST_ID, "steps"),
        ("report.rows", len(content.rows), MOST_ROWS, "rows"),
        ("report.script", len(content.script), NAME_CHARACTERS, "characters"),
        ("report.torch", len(content.torch), NAME_CHARACTERS, "characters"),
        ("sources", len(sources), MOST_FILES, "files"),
        ("sources", lines, MOST_LINES, "lines"),
    )
    errors = {
        field: f"{count:,} {what}; allowed: 0 to {most:,}"
        for field, count, most, what in limits
        if not 0 <= count <= most
    }
    if errors:
        raise Invalid(errors)
    return content


def to_row(report: Report, sources: Mapping[str, str]) -> CheckReport:
    """Return a report as a row without project and author."""
    faults = sum(row.is_fault for row in report.rows)
    return CheckReport(
        script=report.script,
        torch=report.torch,
        steps=report.steps,
        faults=faults,
        notes=len(report.rows) - faults,
        report=as_content(report),
        sources=dict(sources),
    )


def may_delete(report: CheckReport, grants: Grants) -> bool:
    """Return whether a user may delete a report: its author, or who may delete runs there."""
    is_author = report.user_id == grants.user_id and grants.may(WRITE, report.project)
    return is_author or grants.may(Permission.DELETE_RUN, report.project)


def check_deletable(session: Session, report: CheckReport, grants: Grants) -> None:
    """Check that a user may delete a report. Raises Forbidden."""
    if not may_delete(report, grants):
        check_project(session, Permission.DELETE_RUN, report.project, "delete checks of")
