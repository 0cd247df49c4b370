"""Active requests: limits per user, and the end of streams whose access is revoked.

Streams, downloads and uploads outlive the check that admitted them. One task checks twice a second,
with three queries for all of them, whether their session or token is still valid and still allows
them. The others are aborted; a client that still has access resumes with its cursor or range.
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
#: Concurrent long requests of one user, by kind.
STREAM, DOWNLOAD, EXPORT = "stream", "download", "export"
MOST_OF_USER: Mapping[str, int] = MappingProxyType({STREAM: 100, DOWNLOAD: 32, EXPORT: 2})
#: Concurrent exports of all users: each holds a page of 20,000 rows.
MOST_EXPORTS = 4
#: Of one token, one browser, or one address without either, that work or wait for their turn.
MOST_REQUESTS = 200
RETRY_SECONDS = 2
#: The ASGI extension of a server that can abort a response.
ABORT = "halfstep.abort"


class TooManyAtOnce(HalfstepError):
    """Too many requests are under way at once."""

    seconds = RETRY_SECONDS


class AccessRevoked(HalfstepError):
    """Your session or token is no longer valid. Sign in again."""

    code = "sign_in_needed"


@dataclass(eq=False)
class ActiveRequest:
    """One request. secret: hash of its session or token, once admitted. run_id: of its path."""

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
    """A limit for expensive work: a number of concurrent and of waiting requests."""

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
    """All active requests of this process."""

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
        """Count a waiting request. Raises TooManyAtOnce."""
        if self._turns[client] >= MOST_REQUESTS:
            text = f"You have {MOST_REQUESTS} requests under way; allowed: no more at once."
            raise TooManyAtOnce(text)
        self._turns[client] += 1

    def unqueue(self, client: str) -> None:
        """Stop counting a waiting request."""
        self._turns[client] -= 1
        if not self._turns[client]:
            del self._turns[client]

    def lasts(self, flight: ActiveRequest) -> None:
        """Check this request periodically from now on."""
        self._lasting.add(flight)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_after())

    def leave(self, flight: ActiveRequest) -> None:
        """Remove a request that is over."""
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
    """Registers each request from its beginning to its end."""

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
    """Abort the connection, with data that the client has not read yet."""
    if abort := scope.get("extensions", {}).get(ABORT):
        abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def active_request_of(request: Request) -> ActiveRequest:
    """Return the registered request."""
    flight: ActiveRequest = request.state.flight
    return flight
