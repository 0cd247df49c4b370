"""Tables of alerts: rules, alerts, channels and deliveries."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfRun, Table

#: Of a notice, that its condition has held ever since, word for word as its index has it; and of
#: a delivery, that it is still to be made.
IS_OPEN, IS_DUE = text("resolved_at IS NULL"), text("ended_at IS NULL")


class AlertRule(Table):
    """A user's alert rule: condition, scope and channels.

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
    """A rule's condition became true for a run; resolved_at: when it ceased to be true.

    A unique index allows one open alert per rule and run. content is the payload for channels, see
    docs/how-to/alerts.md. rule_id is NULL once the rule is
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
    """A notification channel: kind is webhook, slack or email.

    target: shown on pages, the e-mail address or the host of a URL.  ciphertext: the encrypted
    address, see db.alerts.channels.
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
    """A delivery of an alert through a channel, or a test, which has no alert and no run.

    body: the payload.  due_at: time of the next attempt; a server that takes it postpones it.
    answer: response to the last attempt.  ended_at: end of the attempts.
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
