"""Tables of alerts: rules, alerts, channels and deliveries."""

from sqlalchemy import BigInteger, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfRun, Table
from halfstep.telemetry.plain_json import JsonObject

#: Conditions of an open alert and of a pending delivery, with the exact text of their indexes.
IS_OPEN, IS_DUE = text("resolved_at IS NULL"), text("ended_at IS NULL")
IS_OPEN_OF_SERVICE = text("resolved_at IS NULL AND run_id IS NULL")


class AlertRule(Table):
    """A user's alert rule: condition, scope and channels."""

    __tablename__ = "alert_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    condition: Mapped[str]
    value: Mapped[float | None]  # threshold, for conditions that have one
    metric: Mapped[str] = mapped_column(default="")  # for conditions on a metric
    scope: Mapped[str]  # run, project, mine, all, or service
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    project: Mapped[str] = mapped_column(default="")
    channel_ids: Mapped[list[int]]
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class AlertEvaluation(Table):
    """The single row that synchronizes the alert evaluation of several servers."""

    __tablename__ = "alert_evaluations"

    id: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger)  # rises with every evaluation that wrote a row
    evaluated_at: Mapped[float]


class Alert(OfRun, Table):
    """A rule's condition that became true for a run, or for a subject of the service.

    Unique indexes allow one open alert per rule and run, or subject.
    """

    __tablename__ = "alerts"
    __table_args__ = (
        Index(
            *("ix_alerts_open", "rule_id", "run_id"),
            unique=True,
            sqlite_where=IS_OPEN,
            postgresql_where=IS_OPEN,
        ),
        Index(
            *("ix_alerts_open_subject", "rule_id", "subject"),
            unique=True,
            sqlite_where=IS_OPEN_OF_SERVICE,
            postgresql_where=IS_OPEN_OF_SERVICE,
        ),
        Index("ix_alerts_user_id", "user_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    # Null once the rule is deleted.
    rule_id: Mapped[int | None] = mapped_column(ForeignKey("alert_rules.id"))
    # Null for a condition on the service: shown to those who see all runs.
    run_id: Mapped[int | None] = mapped_column(  # type: ignore[assignment] # null, unlike others
        ForeignKey("runs.id"), index=True
    )
    # Of the service: the worker, project or host that the condition is true for.
    subject: Mapped[str] = mapped_column(default="", server_default="")
    condition: Mapped[str]
    text: Mapped[str]
    content: Mapped[JsonObject]  # payload for channels, see docs/how-to/alerts.md
    created_at: Mapped[float] = mapped_column(default=now())
    resolved_at: Mapped[float | None]  # when the condition became false again
    read_at: Mapped[float | None]


class Channel(Table):
    """A notification channel of a user."""

    __tablename__ = "channels"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    name: Mapped[str]
    kind: Mapped[str]  # webhook, slack or email
    target: Mapped[str]  # shown on pages: the e-mail address, or the host of the URL
    ciphertext: Mapped[str]  # the encrypted address, see db.alerts.channels
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class Delivery(Table):
    """A delivery of an alert through a channel, or of a test, which has no alert and no run."""

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
    body: Mapped[str]  # the payload
    attempts: Mapped[int] = mapped_column(default=0)
    # Time of the next attempt; a server that takes the delivery postpones it.
    due_at: Mapped[float] = mapped_column(default=now())
    created_at: Mapped[float] = mapped_column(default=now())
    tried_at: Mapped[float | None]
    answer: Mapped[str] = mapped_column(default="")  # response to the last attempt
    ended_at: Mapped[float | None]  # no further attempts since then
    is_delivered: Mapped[bool] = mapped_column(default=False)
