"""Tables of notes, presets, views, chart preferences and retention rules."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfProject, Table
from halfstep.telemetry.plain_json import JsonObject


class Note(Table):
    """A note on a project or on a comparison of runs; the note of one run is in its row."""

    __tablename__ = "notes"

    subject: Mapped[str] = mapped_column(primary_key=True)  # see db.runs.notes
    text: Mapped[str]  # Markdown
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))  # author of the last change
    changed_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class Preset(OfProject, Table):
    """A named preset for the form of a new run, shared within its project."""

    __tablename__ = "presets"
    __table_args__ = (UniqueConstraint("project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str]
    recipe: Mapped[str]
    config: Mapped[JsonObject]  # settings that differ from the recipe's defaults
    place: Mapped[dict[str, Any]]  # devices, priority and other fields outside of the configuration
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    saved_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class Upload(Table):
    """An upload of weights by a user, who may start runs from them; see db.files.uploads."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "upload", "user_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    upload: Mapped[str]  # SHA-256 and name, as in weights.upload of a configuration
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    project: Mapped[str | None]  # the project of the token that it was sent with, if limited to one
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    uploaded_at: Mapped[float] = mapped_column(default=now())


class Backup(Table):
    """A backup that was begun; see db.files.backup."""

    __tablename__ = "backups"

    id: Mapped[int] = mapped_column(primary_key=True)
    folder: Mapped[str]
    # Start of the interval that it is made for, in Unix seconds; null if no one needs it any more:
    # made by a command, or failed.
    slot: Mapped[int | None] = mapped_column(BigInteger, unique=True)
    started_at: Mapped[float] = mapped_column(default=now())
    seen_at: Mapped[float] = mapped_column(default=now())  # renewed until it has ended
    ended_at: Mapped[float | None]
    error: Mapped[str] = mapped_column(default="")  # why it failed


class RetentionRule(Table):
    """Ages in days after which files of ended runs are deleted; null: never."""

    __tablename__ = "retention_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    # Null: the rule of every project without its own.
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), unique=True)
    checkpoint_days: Mapped[float | None]
    log_days: Mapped[float | None]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    set_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class SavedView(Table):
    """A named view of the list of runs: the query parameters of its URL."""

    __tablename__ = "saved_views"
    __table_args__ = (UniqueConstraint("user_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    filter: Mapped[str]
    sort: Mapped[str]
    columns: Mapped[str]
    group: Mapped[str] = mapped_column(default="", server_default="")


class ChartPreferences(Table):
    """A user's arrangement of charts: the panels of a recipe, or the toolbar."""

    __tablename__ = "chart_preferences"

    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True)
    scope: Mapped[str] = mapped_column(primary_key=True)  # see db.access.chart_preferences
    content: Mapped[JsonObject]
    changed_at: Mapped[float] = mapped_column(default=now(), onupdate=now())
