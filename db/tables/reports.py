"""Tables of reports: pages of Markdown with panels of runs, and their images."""

from typing import Any

from sqlalchemy import ColumnElement, ForeignKey, Text, UniqueConstraint, cast, false, literal
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfProject, Table


class Report(OfProject, Table):
    """A report of a project. Those who may submit to the project may write it."""

    __tablename__ = "reports"

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), index=True)
    title: Mapped[str]
    text: Mapped[str]  # Markdown
    # What its panels show, all that a link to it opens: kind, runs, metrics and axes of each, and
    # by run its editors, the users who chose it. A link shows a run only if all of them may see it.
    panels: Mapped[list[dict[str, Any]]]
    version: Mapped[int] = mapped_column(default=1)  # counts changes, to detect conflicts
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))  # its author
    created_at: Mapped[float] = mapped_column(default=now())
    editor_id: Mapped[int] = mapped_column(ForeignKey("users.id"))  # author of the last change
    changed_at: Mapped[float] = mapped_column(default=now())
    deleted_at: Mapped[float | None]  # since then in the trash
    erasing: Mapped[bool] = mapped_column(default=False, server_default=false())

    @property
    def run_ids(self) -> list[int]:
        """The runs of all its panels, in order."""
        return list(dict.fromkeys(run_id for panel in self.panels for run_id in panel["runs"]))

    @property
    def edited_panels(self) -> list[dict[str, Any]]:
        """The report's panels; those saved before editors were recorded have the last editor."""
        return [
            {"editors": {str(run_id): [self.editor_id] for run_id in panel["runs"]}} | panel
            for panel in self.panels
        ]


class ReportImage(Table):
    """An image that was uploaded for a report; its file is stored under `key`."""

    __tablename__ = "report_images"
    __table_args__ = (UniqueConstraint("report_id", "sha256"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    report_id: Mapped[int] = mapped_column(ForeignKey("reports.id"))
    sha256: Mapped[str]
    media_type: Mapped[str]  # by its content
    size_bytes: Mapped[int]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    uploaded_at: Mapped[float] = mapped_column(default=now())

    @hybrid_property
    def key(self) -> str:
        """The key of its file in the store."""
        return f"reports/{self.report_id}/{self.sha256}"

    @key.inplace.expression
    @classmethod
    def _key(cls) -> ColumnElement[str]:
        return literal("reports/") + cast(cls.report_id, Text) + "/" + cls.sha256
