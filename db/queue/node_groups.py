"""Attempts of several nodes: rendezvous, liveness and outcome of each node.

Each node has its own lease. Only node 0 closes the attempt, when every other node has ended or its
lease has expired: until then one of them might still train. Every write is fenced.
"""

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import Session

from db.clock import now
from db.queue.queue import lock_active_attempt, node
from db.tables import RunNode, Worker
from halfstep.number_formats import duration

#: A node whose lease has not been renewed for this share of it is lost to the others.
LOST_SHARE = 0.6
#: Failure kind of a rank that only lost contact with another rank.
RANK = "rank"


@dataclass(frozen=True)
class NodeOutcome:
    """Outcome of a node's part of an attempt."""

    reason: str | None = None
    error: str | None = None
    failure_kind: str | None = None  # None: it ended without a failure


def set_rendezvous(session: Session, run_id: int, attempt: int, host: str, port: int) -> None:
    """Store the address of the rendezvous. Raises StaleAttempt."""
    lock_active_attempt(session, run_id, attempt)
    first = node(session, run_id, attempt)
    first.host, first.port = host, port


def rendezvous(session: Session, run_id: int, attempt: int) -> tuple[str, int] | None:
    """Return host and port of the rendezvous, if known."""
    first = node(session, run_id, attempt)
    return (first.host, first.port) if first.host and first.port else None


def stop_reason(
    session: Session, run_id: int, attempt: int, number: int, lease_seconds: float
) -> str | None:
    """Return why this node must stop: another one is lost, or ended with an error.

    lease_seconds: infinite to consider no node lost.
    """
    left = RunNode.lease_expires_at - now()
    for other, worker, seconds_left in session.execute(_others(run_id, attempt, number, left)):
        who = f"node {other.node} ({worker})"
        if other.ending is not None and other.ending["failure_kind"]:
            return f"{who}: {other.ending['reason']}"
        silent = lease_seconds - seconds_left
        if other.ended_at is None and LOST_SHARE * lease_seconds < silent < math.inf:
            return f"{who} has not reported for {duration(silent)}"
    return None


def record_outcome(
    session: Session, run_id: int, attempt: int, number: int, ending: NodeOutcome
) -> None:
    """Record how a node ended; the other nodes then stop too. Raises StaleAttempt."""
    lock_active_attempt(session, run_id, attempt)
    row = node(session, run_id, attempt, number)
    if row.ending is None:  # the first outcome is the cause
        row.ending = {
            "reason": ending.reason,
            "error": ending.error,
            "failure_kind": ending.failure_kind,
        }
    if number:
        row.ended_at = row.ended_at or now()


def others_have_ended(session: Session, run_id: int, attempt: int) -> bool:
    """Return whether all nodes but the first have ended or lost their lease."""
    alive = (RunNode.node > 0) & RunNode.ended_at.is_(None) & (RunNode.lease_expires_at >= now())
    query = select(RunNode.node).where(_of(run_id, attempt), alive).limit(1)
    return session.scalar(query) is None


def cause(session: Session, run_id: int, attempt: int) -> NodeOutcome | None:
    """Return the outcome of another node that caused the first node's failure, if any.

    A node that failed by itself takes precedence over one that was killed or lost, and that over
    one that was stopped; a node that only lost contact with other ranks is no cause.
    """
    outcomes = []
    left = RunNode.lease_expires_at - now()
    for other, worker, _left in session.execute(_others(run_id, attempt, 0, left)):
        who = f"node {other.node} ({worker})"
        if other.ending is None and other.ended_at is None:
            outcomes.append(NodeOutcome(f"{who} was lost", None, "infrastructure"))
        elif other.ending and other.ending["reason"] and other.ending["failure_kind"] != RANK:
            reason = f"{who}: {other.ending['reason']}"
            error, failure_kind = other.ending["error"], other.ending["failure_kind"]
            outcomes.append(NodeOutcome(reason, error, failure_kind))
    rank = {"infrastructure": 1, None: 2}
    return min(outcomes, key=lambda outcome: rank.get(outcome.failure_kind, 0), default=None)


def _others(run_id: int, attempt: int, number: int, left: ColumnElement[Any]) -> Select[Any]:
    query = select(RunNode, Worker.name, left).join(Worker, Worker.id == RunNode.worker_id)
    return query.where(_of(run_id, attempt), RunNode.node != number).order_by(RunNode.node)


def _of(run_id: int, attempt: int) -> ColumnElement[bool]:
    return (RunNode.run_id == run_id) & (RunNode.attempt == attempt)
