"""Table of uploaded reports of `halfstep check`."""

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfProject, Table
from halfstep.telemetry.plain_json import JsonObject


class CheckReport(OfProject, Table):
    """A report of `halfstep check`, with the sources that its rows name."""

    __tablename__ = "check_reports"

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(default=now())
    script: Mapped[str]
    torch: Mapped[str]  # its version
    steps: Mapped[int]  # that were checked
    faults: Mapped[int]  # rows that are mistakes
    notes: Mapped[int]  # other rows
    # Up to 1 MB together, so that lists leave them out.
    report: Mapped[JsonObject] = mapped_column(deferred=True)  # halfstep.check.report.Report
    sources: Mapped[dict[str, str]] = mapped_column(JSON, deferred=True)  # texts by file
