"""Tables of notes, presets, views and retention rules."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfProject, Table


class Note(Table):
    """What people wrote of a project or of runs side by side, in Markdown; a run has its own.

    subject: as db.runs.notes has it.  user_id: who changed it last.
    """

    __tablename__ = "notes"

    subject: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    changed_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class Preset(OfProject, Table):
    """What the form of a new run is filled with, under a name, for who may submit to its project.

    config: those settings that are not the recipe's defaults.  place: what is asked of every run.
    """

    __tablename__ = "presets"
    __table_args__ = (UniqueConstraint("project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str]
    recipe: Mapped[str]
    config: Mapped[dict[str, Any]]
    place: Mapped[dict[str, Any]]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    saved_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class Upload(Table):
    """That a user has uploaded weights, and so may start runs from them; see db.files.uploads."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "upload", "user_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    upload: Mapped[str]  # SHA-256 and name, as weights.upload of a configuration has them
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    project: Mapped[str | None]  # the only one that the token opens with which it was sent
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    uploaded_at: Mapped[float] = mapped_column(default=now())


class RetentionRule(Table):
    """After how many days what of ended runs is deleted; null days: never.

    project: whose runs; null: of every project that has no rule of its own.
    """

    __tablename__ = "retention_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), unique=True)
    checkpoint_days: Mapped[float | None]
    log_days: Mapped[float | None]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    set_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class SavedView(Table):
    """What a person has looked at the list of runs by, under a name: parts of its address."""

    __tablename__ = "saved_views"
    __table_args__ = (UniqueConstraint("user_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    filter: Mapped[str]
    sort: Mapped[str]
    columns: Mapped[str]
    group: Mapped[str] = mapped_column(default="", server_default="")
