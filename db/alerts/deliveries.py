"""Deliveries of alerts through channels, retried with growing pauses.

A server that takes a delivery postpones its due time in the same statement: no other server takes
it too, and if the server ends before it has an answer, the delivery is retried. A receiver may
therefore receive a delivery twice, with the same number.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Select, select, update
from sqlalchemy import delete as delete_from
from sqlalchemy.orm import Session

from db.access import permissions
from db.alerts import channels
from db.clock import now
from db.errors import Conflict
from db.paging import Page, page
from db.tables import Channel, Delivery, Run, User

#: Pauses before the second, third, … attempt; no attempt follows the one after the last pause.
PAUSES = (10.0, 60.0, 300.0, 1800.0, 7200.0)
#: Longer than any attempt: a server without an outcome by then has ended.
TAKEN_SECONDS = 120.0
TAKEN_AT_ONCE = 8
ANSWER_CHARACTERS = 500
RETENTION_SECONDS = 30 * 86_400.0
#: Limit of pending tests per user, because each one sends a message.
MOST_TESTS = 5


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt."""

    is_delivered: bool
    answer: str
    is_final: bool = False  # retries would not help


def list_deliveries(session: Session, user: User, *, after: str = "", limit: int) -> Page:
    """Return a page of a user's deliveries with their channels, newest first."""
    query = select(Delivery, Channel).join(Channel, Channel.id == Delivery.channel_id)
    query = query.where(Delivery.user_id == user.id)
    return page(session, query, (Delivery.id,), after=after, limit=limit, newest_first=True)


def test(session: Session, user: User, channel_id: int, address: str) -> Delivery:
    """Queue a test delivery through a user's channel. Raises NotFound, Conflict."""
    channel = channels.mine(session, user, channel_id)
    waiting = select(Delivery.id).where(
        Delivery.user_id == user.id, Delivery.alert_id.is_(None), Delivery.ended_at.is_(None)
    )
    if len(session.scalars(waiting.limit(MOST_TESTS)).all()) == MOST_TESTS:
        raise Conflict(f"{MOST_TESTS} tests are already in progress: wait for their results.")
    text = f"This is a test of the channel {channel.name}, requested by {user.name}."
    body = {"event": "test", "text": text, "url": f"{address}/alerts"}
    row = Delivery(user_id=user.id, channel_id=channel.id, body=json.dumps(body))
    session.add(row)
    session.flush()
    return row


def is_any_due(session: Session) -> bool:
    """Return whether a delivery is due, without taking locks."""
    return session.scalar(_due().limit(1)) is not None


class Taken(NamedTuple):
    """A delivery to attempt."""

    delivery: Delivery
    channel: Channel
    is_visible: bool  # whether its user may see what it is about


def take(session: Session) -> list[Taken]:
    """Take a few of the deliveries that are due."""
    some = _due().order_by(Delivery.due_at).limit(TAKEN_AT_ONCE).with_for_update(skip_locked=True)
    taken = (
        update(Delivery)
        .where(Delivery.id.in_(session.scalars(some).all()))
        .values(due_at=now() + TAKEN_SECONDS, attempts=Delivery.attempts + 1, tried_at=now())
        .returning(Delivery.id)
    )
    ids = session.scalars(taken).all()
    query = select(Delivery, Channel, Run.project)
    query = query.join(Channel, Channel.id == Delivery.channel_id)
    query = query.outerjoin(Run, Run.id == Delivery.run_id)
    rows = session.execute(query.where(Delivery.id.in_(ids)).order_by(Delivery.id)).all()
    seen = permissions.seen_by(session, {delivery.user_id for delivery, _channel, _project in rows})
    return [
        Taken(delivery, channel, _sees(seen.get(delivery.user_id, set()), delivery, project))
        for delivery, channel, project in rows
    ]


def _sees(projects: set[str] | None, delivery: Delivery, project: str | None) -> bool:
    """Return whether a user may receive a delivery. projects: the visible ones; None: all."""
    is_test = delivery.alert_id is None and delivery.run_id is None
    return projects is None or project in projects or is_test


def note(session: Session, delivery_id: int, attempt: int, outcome: Outcome) -> None:
    """Record the outcome of an attempt, unless a later attempt has begun."""
    row = session.get(Delivery, delivery_id, with_for_update=True)
    if row is None or row.attempts != attempt or row.ended_at is not None:
        return
    row.answer, row.is_delivered = outcome.answer[:ANSWER_CHARACTERS], outcome.is_delivered
    if outcome.is_delivered or outcome.is_final or attempt > len(PAUSES):
        row.ended_at = now()
    else:
        row.due_at = now() + PAUSES[attempt - 1]


def prune(session: Session) -> None:
    """Delete deliveries that ended more than RETENTION_SECONDS ago."""
    session.execute(delete_from(Delivery).where(Delivery.ended_at < now() - RETENTION_SECONDS))


def _due() -> Select[int]:
    return select(Delivery.id).where(Delivery.ended_at.is_(None), Delivery.due_at <= now())
