"""Requests under way: how many of whom, and whether those that last may go on.

A stream, a download or an upload outlives the moment that let it in. One task looks, twice a second
and with three queries however many there are, whether what they came with still lets them in and
allows as much. What it finds otherwise is broken off: whoever may still come comes back, with the
cursor or the range where it was.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType

from sqlalchemy import select
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from db.access import accounts
from db.access.permissions import Grants, Permission
from db.database import Database, is_outage
from db.errors import HalfstepError
from db.tables import Run

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
#: Of one user at once, by what lasts.
STREAM, DOWNLOAD, EXPORT = "stream", "download", "export"
MOST_OF_USER: Mapping[str, int] = MappingProxyType({STREAM: 100, DOWNLOAD: 32, EXPORT: 2})
#: Of all users at once: each holds a page of 20,000 rows.
MOST_EXPORTS = 4
#: Of one token, one browser, or one address without either, that work or wait for their turn.
MOST_REQUESTS = 200
RETRY_SECONDS = 2
#: What a server that can break off an answer calls that, among a scope's extensions.
ABORT = "halfstep.abort"


class TooManyAtOnce(HalfstepError):
    """Too many requests are under way at once."""

    seconds = RETRY_SECONDS


class AccessRevoked(HalfstepError):
    """What this request came with lets nobody in any more."""

    code = "sign_in_needed"


@dataclass(eq=False)
class ActiveRequest:
    """One request. secret: the hash of what it came with, once that has let somebody in.
    run_id: that it names.
    """

    task: "asyncio.Task[object] | None" = None
    secret: str = ""
    grants: Grants | None = None
    kind: str = ""
    run_id: int | None = None
    has_started: bool = False
    is_over: bool = False

    def may_go_on(self, now: Grants | None, project: str | None) -> bool:
        """Tell whether it is still allowed. now: what its secret lets somebody do, if anything.
        project: in which its run is, which may have been moved.
        """
        if self.grants is None:
            return True
        if now is None or not now.covers(self.grants):
            return False
        permission = (
            Permission.DOWNLOAD_FILES if self.kind in (DOWNLOAD, EXPORT) else Permission.VIEW_RUN
        )
        return project is None or now.may(permission, project)

    def break_off(self) -> None:
        """Let it go on no more: an answer that has begun ends here, a body is read no further."""
        self.is_over = True
        if self.has_started and self.task is not None:
            self.task.cancel()


class Queue:
    """Turns at something that is dear: so many at once, and so many who wait."""

    def __init__(self, at_once: int, most: int, doing: str) -> None:
        self._turns, self._most, self._doing = asyncio.Semaphore(at_once), most, doing
        self._count = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and have it. Raises TooManyAtOnce."""
        if self._count >= self._most:
            raise TooManyAtOnce(f"Too many {self._doing} at once. Try again in a moment.")
        self._count += 1
        try:
            async with self._turns:
                yield
        finally:
            self._count -= 1


class ActiveRequests:
    """All requests under way in this process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()  # requests are admitted in threads
        self._admitted: set[ActiveRequest] = set()
        self._lasting: set[ActiveRequest] = set()
        self._turns: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def admit(
        self, flight: ActiveRequest, grants: Grants, secret: str, kind: str, run_id: int | None
    ) -> None:
        """Note whose request it is, by what, and of which run. Raises TooManyAtOnce."""
        with self._lock:
            same = [each for each in self._admitted if kind and each.kind == kind]
            mine = [each.grants for each in same if each.grants]
            count = sum(each.user_id == grants.user_id for each in mine)
            if kind and count >= MOST_OF_USER[kind]:
                text = f"You have {count} {kind}s open; allowed: {MOST_OF_USER[kind]} at once."
                raise TooManyAtOnce(text)
            if kind == EXPORT and len(same) >= MOST_EXPORTS:
                raise TooManyAtOnce(f"{MOST_EXPORTS} exports are under way; allowed: no more.")
            flight.grants, flight.kind, flight.run_id = grants, kind, run_id
            flight.secret = accounts.hash_of(secret)
            self._admitted.add(flight)

    def queue(self, client: str) -> None:
        """Count a request that waits for its turn. Raises TooManyAtOnce."""
        if self._turns[client] >= MOST_REQUESTS:
            text = f"You have {MOST_REQUESTS} requests under way; allowed: no more at once."
            raise TooManyAtOnce(text)
        self._turns[client] += 1

    def unqueue(self, client: str) -> None:
        """Count it no more."""
        self._turns[client] -= 1
        if not self._turns[client]:
            del self._turns[client]

    def lasts(self, flight: ActiveRequest) -> None:
        """Look after a request from here on: there is more of it to come."""
        self._lasting.add(flight)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_after())

    def leave(self, flight: ActiveRequest) -> None:
        """Forget a request that is over."""
        self._lasting.discard(flight)
        with self._lock:
            self._admitted.discard(flight)

    async def _look_after(self) -> None:
        while self._lasting:
            known = [each for each in self._lasting if each.grants and not each.is_over]
            if known:
                found = await asyncio.to_thread(self._rights, known)
                for flight in known:
                    if found is not None and not flight.may_go_on(*found(flight)):
                        flight.break_off()
            await asyncio.sleep(LOOK_SECONDS)

    def _rights(
        self, flights: Collection[ActiveRequest]
    ) -> Callable[[ActiveRequest], tuple[Grants | None, str | None]] | None:
        """Return what tells of each what is allowed now, and where its run is; None while the
        database is away.
        """
        secrets = {each.secret for each in flights}
        run_ids = {each.run_id for each in flights if each.run_id is not None}
        try:
            with self._database.reading() as session:
                all_grants = accounts.all_grants(session, secrets)
                rows = session.execute(select(Run.id, Run.project).where(Run.id.in_(run_ids)))
                projects = {row[0]: row[1] for row in rows}
        except Exception as error:
            if not is_outage(error):
                logger.exception("who may go on cannot be told")
                return lambda _flight: (None, None)
            logger.warning("open streams are not checked: %s", error)
            return None
        return lambda flight: (all_grants.get(flight.secret), projects.get(flight.run_id or 0))


class ActiveRequestsMiddleware:
    """Knows each request from its beginning to its end."""

    def __init__(self, app: ASGIApp, active_requests: ActiveRequests) -> None:
        self.app, self.active_requests = app, active_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        flight = ActiveRequest(asyncio.current_task())
        scope.setdefault("state", {})["flight"] = flight

        async def receive_while_allowed() -> Message:
            message = await receive()
            if flight.is_over and not flight.has_started:
                raise AccessRevoked
            if message.get("more_body"):
                self.active_requests.lasts(flight)
            return message

        async def send_noting(message: Message) -> None:
            flight.has_started = True
            if message["type"] == "http.response.body":
                if message.get("more_body"):
                    self.active_requests.lasts(flight)
                else:
                    self.active_requests.leave(flight)
            await send(message)

        try:
            await self.app(scope, receive_while_allowed, send_noting)
        except asyncio.CancelledError:
            if not flight.is_over or flight.task is None:
                raise
            flight.task.uncancel()
            await _abort(scope, receive)
        finally:
            self.active_requests.leave(flight)


async def _abort(scope: Scope, receive: Receive) -> None:
    """Close the connection, with what the client has not read yet."""
    if abort := scope.get("extensions", {}).get(ABORT):
        abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def active_request_of(request: Request) -> ActiveRequest:
    """Return what is known of a request under way."""
    flight: ActiveRequest = request.state.flight
    return flight
