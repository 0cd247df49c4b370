"""Writing down who changed what: with every change that a signed-in request makes, in its own
transaction, so that there is no deed without a row, nor a row without its deed. Who comes in, or is
refused, and what is typed on the server's machine stands there too.

Only the fields that a route names with `audited` are kept, so that no secret is.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from app.auth.login_throttling import network_of
from app.dependencies import Posted
from db.access import accounts
from db.access.audit import DETAIL_CHARACTERS
from db.database import Database, now
from db.tables import LARGEST_ID, AuditEvent, User

logger = logging.getLogger(__name__)

CHARACTERS, VALUE_CHARACTERS = 200, 100
#: Refusals of one address, for one user or for nobody, are written down so often.
REFUSED, REFUSED_SECONDS = "refused", 60.0

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def audited(*fields: str) -> Callable[[Endpoint], Endpoint]:
    """Declare which submitted fields the audit log keeps of a route: no secrets, no notes."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["audited_fields"] = fields
        return endpoint

    return declare


def unaudited(endpoint: Endpoint) -> Endpoint:
    """Declare that a POST changes nothing that others see: the audit log leaves it out."""
    endpoint.__dict__["is_audited"] = False
    return endpoint


def audited_fields(endpoint: object) -> tuple[str, ...]:
    """Return the submitted fields that the audit log keeps of a route."""
    fields: tuple[str, ...] = getattr(endpoint, "audited_fields", ())
    return fields


_PENDING = "audit_events"


async def _detail(request: Request, posted: Posted) -> str:
    fields = audited_fields(request.scope["endpoint"])
    if not fields:
        return ""
    sent: dict[str, Any] = {**request.query_params, **posted}
    if "json" in request.headers.get("content-type", ""):
        try:
            body = await request.json()
        except ValueError:  # the route refuses it
            body = None
        sent |= body if isinstance(body, dict) else {}
    return _in_words({name: sent[name] for name in fields if name in sent})


#: What of a request is written down, beside its address.
Detail = Annotated[str, Depends(_detail)]


def _in_words(values: Mapping[str, Any]) -> str:
    """Say some fields in a line, cut where it is too long."""
    told = ((name, _word(value)) for name, value in values.items())
    return ", ".join(f"{name} {word}" for name, word in told if word)[:DETAIL_CHARACTERS]


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_word(each) for each in value if not isinstance(each, list))
    if not isinstance(value, str | int | float):
        return ""
    return "".join(each for each in str(value) if each.isprintable())[:VALUE_CHARACTERS]


def note(session: Session, user: User, request: Request, token: str | None, detail: str) -> None:
    """Write down a request that changes something, once it has. token: the name of the one that it
    came with.
    """
    if not getattr(request.scope["endpoint"], "is_audited", True):
        return
    run_id = str(request.path_params.get("run_id", ""))
    # One that is none is refused, and this with it, where the route's parameters are read.
    is_id = run_id.isdecimal() and len(run_id) <= len(str(LARGEST_ID))
    said = _said(request, detail) | {"user_id": user.id, "token": token}
    done = [said | {"run_id": min(int(run_id), LARGEST_ID) if is_id else None}]
    request.state.audit_events = session.info[_PENDING] = done


def done_to(session: Session, run_ids: Iterable[int]) -> None:
    """Say to which runs the request of a session was done: a deed each."""
    pending = session.info.get(_PENDING, [])
    pending[:] = [each | {"run_id": run_id} for run_id in run_ids for each in pending]


def tell(session: Session, detail: str) -> None:
    """Say what the request of a session has done, where only its route knows."""
    for each in session.info.get(_PENDING, ()):
        each["detail"] = detail[:DETAIL_CHARACTERS]


def forget(request: Request) -> None:
    """Write nothing down of a request that a page refuses: nothing was done."""
    getattr(request.state, "audit_events", []).clear()


@event.listens_for(Session, "before_commit")
def _write(session: Session) -> None:
    """Write them at the very end: nobody changes a deed that is written."""
    if not session.in_nested_transaction():
        session.add_all(AuditEvent(**each) for each in session.info.pop(_PENDING, ()))


def note_now(
    session: Session, request: Request, user: User, detail: str, run_id: int | None = None
) -> None:
    """Write down at once what no signed-in request is: that somebody comes in, or has sent a file
    or a watched run.
    """
    token = getattr(request.state, "token", None)
    said = _said(request, detail) | {"user_id": user.id, "token": token, "run_id": run_id}
    session.add(AuditEvent(**said))


def note_refusal(database: Database, request: Request, name: str = "") -> None:
    """Write down that somebody was refused, unless it was lately; to be called after the answer,
    which so takes as long whether the name is somebody's or not.

    name: that was tried. It is kept if it is a user's alone: another may be a password, typed into
    the wrong field.
    """
    said = _said(request, REFUSED)
    said["address"] = network_of(said["address"])
    same = [getattr(AuditEvent, name) == value for name, value in said.items()]
    try:
        with database.writing() as session:
            user = accounts.find_user(session, name)
            same.append(AuditEvent.user_id == user.id if user else AuditEvent.user_id.is_(None))
            since = session.scalars(select(now())).one() - REFUSED_SECONDS  # a number: by the index
            recent = select(AuditEvent.id).where(AuditEvent.time > since, *same)
            if session.scalar(recent.limit(1)) is None:
                session.add(AuditEvent(**said, user_id=user.id if user else None))
    except DBAPIError as error:
        logger.warning("a refused sign-in was not written down: %s", error.orig)


def _said(request: Request, detail: str) -> dict[str, Any]:
    return {
        "action": f"{request.method} {request.url.path}"[:CHARACTERS],
        "detail": detail[:DETAIL_CHARACTERS],
        "address": request.client.host[:64] if request.client else "",
    }
