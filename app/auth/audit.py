"""The audit log of requests.

Each change by a signed-in request is recorded in the transaction of the change, so neither exists
without the other. Sign-ins, refused sign-ins and commands on the server are recorded, too.

Only the fields that a route names with `audited` are recorded, so secrets are not.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from app.auth.login_throttling import network_of
from app.dependencies import Posted
from app.http.media_types import is_json
from db.access import accounts
from db.access.audit import DETAIL_CHARACTERS, was_recorded
from db.database import Database
from db.tables import LARGEST_ID, AuditEvent, User

logger = logging.getLogger(__name__)

CHARACTERS, VALUE_CHARACTERS = 200, 100
#: Failed sign-ins from one address for one name are recorded at this interval.
REFUSED, REFUSED_SECONDS = "refused", 60.0

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def audited(*fields: str) -> Callable[[Endpoint], Endpoint]:
    """Declare which submitted fields the audit log records: no secrets, no notes."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["audited_fields"] = fields
        return endpoint

    return declare


def unaudited(reason: str) -> Callable[[Endpoint], Endpoint]:
    """Declare why the audit log does not record a route that takes data."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["unaudited"] = reason
        return endpoint

    return declare


def reason_unaudited(endpoint: object) -> str:
    """Return why the audit log does not record a route; empty if it does."""
    reason: str = getattr(endpoint, "unaudited", "")
    return reason


def get_audited_fields(endpoint: object) -> tuple[str, ...]:
    """Return the submitted fields of a route that the audit log records."""
    fields: tuple[str, ...] = getattr(endpoint, "audited_fields", ())
    return fields


_PENDING = "audit_events"


async def _detail(request: Request, posted: Posted) -> str:
    fields = get_audited_fields(request.scope["endpoint"])
    if not fields:
        return ""
    sent: dict[str, Any] = {**request.query_params, **posted}
    if is_json(request.headers):
        try:
            body = await request.json()
        except ValueError:  # the route reports it
            body = None
        sent |= body if isinstance(body, dict) else {}
    return _in_words({name: sent[name] for name in fields if name in sent})


#: The detail of a request that the audit log records next to its path.
Detail = Annotated[str, Depends(_detail)]


def _in_words(values: Mapping[str, object]) -> str:
    """Format fields as one line, cut at a limit."""
    words = ((name, _word(value)) for name, value in values.items())
    return ", ".join(f"{name} {word}" for name, word in words if word)[:DETAIL_CHARACTERS]


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_word(item) for item in value if not isinstance(item, list))
    if not isinstance(value, str | int | float):
        return ""
    return "".join(c for c in str(value) if c.isprintable())[:VALUE_CHARACTERS]


def record(session: Session, user: User, request: Request, token: str | None, detail: str) -> None:
    """Record a request that changes data when its session commits. token: its name."""
    if reason_unaudited(request.scope["endpoint"]):
        return
    run_id = str(request.path_params.get("run_id", ""))
    # An invalid id is rejected later by the route's parameters, and nothing is recorded.
    is_id = run_id.isdecimal() and len(run_id) <= len(str(LARGEST_ID))
    row = _row(request, detail) | {"user_id": user.id, "token": token}
    rows = [row | {"run_id": min(int(run_id), LARGEST_ID) if is_id else None}]
    request.state.audit_events = session.info[_PENDING] = rows


def set_runs(session: Session, run_ids: Iterable[int]) -> None:
    """Record the request of a session as one event for each of these runs."""
    pending = session.info.get(_PENDING, [])
    pending[:] = [row | {"run_id": run_id} for run_id in run_ids for row in pending]


def set_detail(session: Session, detail: str) -> None:
    """Set the detail of a session's request, if only the route can determine it."""
    for row in session.info.get(_PENDING, ()):
        row["detail"] = detail[:DETAIL_CHARACTERS]


def discard(request: Request) -> None:
    """Record nothing for a request that a page rejects."""
    getattr(request.state, "audit_events", []).clear()


@event.listens_for(Session, "before_commit")
def _write(session: Session) -> None:
    """Write the events just before the commit: rows of the audit log cannot be changed."""
    if not session.in_nested_transaction():
        session.add_all(AuditEvent(**row) for row in session.info.pop(_PENDING, ()))


def record_now(
    session: Session, request: Request, user: User, detail: str, run_id: int | None = None
) -> None:
    """Record an event immediately: a sign-in, or an uploaded file or watched run."""
    token = getattr(request.state, "token", None)
    row = _row(request, detail) | {"user_id": user.id, "token": token, "run_id": run_id}
    session.add(AuditEvent(**row))


def record_refusal(database: Database, request: Request, name: str = "") -> None:
    """Record a refused sign-in, at most once in REFUSED_SECONDS.

    Called after the response, whose time therefore does not depend on whether the user exists.
    name: as typed. Recorded only if such a user exists: it may be a password in the wrong field.
    """
    row = _row(request, REFUSED)
    row["address"] = network_of(row["address"])
    try:
        with database.writing() as session:
            user = accounts.find_user(session, name)
            row["user_id"] = user.id if user else None
            if not was_recorded(session, row, seconds=REFUSED_SECONDS):
                session.add(AuditEvent(**row))
    except DBAPIError as error:
        logger.warning("a refused sign-in was not recorded: %s", error.orig)


def _row(request: Request, detail: str) -> dict[str, Any]:
    return {
        "action": f"{request.method} {request.url.path}"[:CHARACTERS],
        "detail": detail[:DETAIL_CHARACTERS],
        "address": request.client.host[:64] if request.client else "",
    }
