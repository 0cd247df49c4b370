"""Who wants to be told of what, what there was to tell, and by which way it went."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfRun, Table

#: Of a notice, that its condition has held ever since, word for word as its index has it; and of
#: a delivery, that it is still to be made.
IS_OPEN, IS_DUE = text("resolved_at IS NULL"), text("ended_at IS NULL")


class AlertRule(Table):
    """Of what somebody wants to be told: a condition, of which runs, and by which channels.

    scope: run, project, mine or all.  value: of conditions that have one; metric: likewise.
    """

    __tablename__ = "alert_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    condition: Mapped[str]
    value: Mapped[float | None]
    metric: Mapped[str] = mapped_column(default="")
    scope: Mapped[str]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    project: Mapped[str] = mapped_column(default="")
    channel_ids: Mapped[list[int]]
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class AlertEvaluation(Table):
    """The one row that servers agree by: turn rises with every look that wrote something."""

    __tablename__ = "alert_evaluations"

    id: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger)
    evaluated_at: Mapped[float]


class Alert(OfRun, Table):
    """That a rule's condition came to hold for a run; resolved_at: when it was so no longer.

    While it holds there is one notice of a rule and a run, which its index decides. content is what
    channels are told, as docs/how-to/alerts.md describes it. rule_id is NULL once the rule is
    deleted.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        Index(
            *("ix_alerts_open", "rule_id", "run_id"),
            unique=True,
            sqlite_where=IS_OPEN,
            postgresql_where=IS_OPEN,
        ),
        Index("ix_alerts_user_id", "user_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    rule_id: Mapped[int | None] = mapped_column(ForeignKey("alert_rules.id"))
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    condition: Mapped[str]
    text: Mapped[str]
    content: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=now())
    resolved_at: Mapped[float | None]
    read_at: Mapped[float | None]


class Channel(Table):
    """How somebody is told: kind is webhook, slack or email.

    target is what pages show of it: an address of e-mail, or of a URL no more than the host.
    ciphertext: what it takes to reach it, see db.alerts.channels.
    """

    __tablename__ = "channels"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    name: Mapped[str]
    kind: Mapped[str]
    target: Mapped[str]
    ciphertext: Mapped[str]
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class Delivery(Table):
    """A notice on its way through a channel, or a test, which has no notice and no run.

    body is what is sent.  due_at: when it is tried next; a server that tries it puts that off, so
    that no other does.  answer: to the last attempt.  ended_at: since when it is tried no more.
    """

    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "due_at", sqlite_where=IS_DUE, postgresql_where=IS_DUE),
        Index("ix_deliveries_user_id", "user_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    channel_id: Mapped[int] = mapped_column(ForeignKey("channels.id"), index=True)
    alert_id: Mapped[int | None] = mapped_column(ForeignKey("alerts.id"), index=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    body: Mapped[str]
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[float] = mapped_column(default=now())
    created_at: Mapped[float] = mapped_column(default=now())
    tried_at: Mapped[float | None]
    answer: Mapped[str] = mapped_column(default="")
    ended_at: Mapped[float | None]
    is_delivered: Mapped[bool] = mapped_column(default=False)
