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

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from db.access import accounts
from db.access.permissions import Grants, Permission
from db.database import Database, is_outage
from db.errors import HalfstepError
from db.runs import runs

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
#: Concurrent long requests of one user, by kind.
STREAM, DOWNLOAD, EXPORT = "stream", "download", "export"
MOST_OF_USER: Mapping[str, int] = MappingProxyType({STREAM: 100, DOWNLOAD: 32, EXPORT: 2})
#: Concurrent exports of all users: each holds a page of 20,000 rows.
MOST_EXPORTS = 4
#: Requests in progress or waiting, per valid token or session, or address without either.
MOST_REQUESTS = 200
#: Valid tokens and sessions that are remembered for that.
MOST_SECRETS = 10_000
RETRY_SECONDS = 2
#: The ASGI extension of a server that can abort a response.
ABORT = "halfstep.abort"


class TooManyAtOnce(HalfstepError):
    """Too many concurrent requests."""

    seconds = RETRY_SECONDS


class AccessRevoked(HalfstepError):
    """Your session or token is no longer valid. Sign in again."""

    code = "sign_in_needed"


@dataclass(eq=False)
class ActiveRequest:
    """A request in progress."""

    task: "asyncio.Task[object] | None" = None
    secret: str = ""  # hash of its session or token, once admitted
    grants: Grants | None = None
    kind: str = ""
    run_id: int | None = None  # of its path
    has_started: bool = False
    is_over: bool = False

    def is_allowed(self, now: Grants | None, project: str | None) -> bool:
        """Return whether the request is still allowed.

        now: current grants of its secret, if any.  project: of its run, which may have been moved.
        """
        if self.grants is None:
            return True
        if now is None or not now.covers(self.grants):
            return False
        if self.kind == STREAM and now.projects != self.grants.projects:
            return False  # its browser reconnects, and gets runs of the new projects too
        permission = (
            Permission.DOWNLOAD_FILES if self.kind in (DOWNLOAD, EXPORT) else Permission.VIEW_RUN
        )
        return project is None or now.may(permission, project)

    def abort(self) -> None:
        """Abort a response that has begun; stop reading a request body."""
        self.is_over = True
        if self.has_started and self.task is not None:
            self.task.cancel()


class Queue:
    """A limit for expensive work: a number of concurrent and of waiting requests."""

    def __init__(self, at_once: int, most: int, noun: str) -> None:
        self._turns, self._most, self._noun = asyncio.Semaphore(at_once), most, noun
        self._count = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises TooManyAtOnce."""
        if self._count >= self._most:
            raise TooManyAtOnce(f"Too many {self._noun} at once. Try again in a moment.")
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
        self._valid: dict[str, None] = {}  # hashes of secrets, the most recent last
        self._task: asyncio.Task[None] | None = None

    def admit(
        self, active: ActiveRequest, grants: Grants, secret: str, kind: str, run_id: int | None
    ) -> None:
        """Register user, secret, kind and run of a request. Raises TooManyAtOnce."""
        with self._lock:
            same = [active for active in self._admitted if kind and active.kind == kind]
            owners = [active.grants for active in same if active.grants]
            count = sum(owner.user_id == grants.user_id for owner in owners)
            if kind and count >= MOST_OF_USER[kind]:
                text = f"You have {count} {kind}s open; allowed: {MOST_OF_USER[kind]} at once."
                raise TooManyAtOnce(text)
            if kind == EXPORT and len(same) >= MOST_EXPORTS:
                raise TooManyAtOnce(f"{MOST_EXPORTS} exports are in progress, the limit.")
            active.grants, active.kind, active.run_id = grants, kind, run_id
            active.secret = accounts.hash_of(secret)
            self._admitted.add(active)
        self.note_valid(secret)

    def note_valid(self, secret: str) -> None:
        """Count requests with this token or session separately from now on."""
        with self._lock:
            key = accounts.hash_of(secret)
            self._valid.pop(key, None)
            self._valid[key] = None
            if len(self._valid) > MOST_SECRETS:
                del self._valid[next(iter(self._valid))]

    def client_of(self, secret: str, address: str) -> str:
        """Return the key under which a request is counted before it is authenticated.

        A secret that has not been valid counts for its address, since a client can invent any
        number of them.
        """
        key = accounts.hash_of(secret)
        return key if key in self._valid else address

    def queue(self, client: str) -> None:
        """Count a waiting request. Raises TooManyAtOnce."""
        if self._turns[client] >= MOST_REQUESTS:
            text = f"You have {MOST_REQUESTS} requests in progress, the limit."
            raise TooManyAtOnce(text)
        self._turns[client] += 1

    def unqueue(self, client: str) -> None:
        """Stop counting a waiting request."""
        self._turns[client] -= 1
        if not self._turns[client]:
            del self._turns[client]

    def lasts(self, active: ActiveRequest) -> None:
        """Check this request periodically from now on."""
        self._lasting.add(active)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._check_periodically())

    def leave(self, active: ActiveRequest) -> None:
        """Remove a request that is over."""
        self._lasting.discard(active)
        with self._lock:
            self._admitted.discard(active)

    async def _check_periodically(self) -> None:
        while self._lasting:
            known = [active for active in self._lasting if active.grants and not active.is_over]
            if known:
                current = await asyncio.to_thread(self._current_grants, known)
                for active in known:
                    if current is not None and not active.is_allowed(*current(active)):
                        active.abort()
            await asyncio.sleep(CHECK_SECONDS)

    def _current_grants(
        self, requests: Collection[ActiveRequest]
    ) -> Callable[[ActiveRequest], tuple[Grants | None, str | None]] | None:
        """Return a function of a request that returns its current grants and its run's project.

        None while the database is unavailable.
        """
        secrets = {active.secret for active in requests}
        run_ids = {active.run_id for active in requests if active.run_id is not None}
        try:
            with self._database.reading() as session:
                all_grants = accounts.all_grants(session, secrets)
                projects = runs.projects_of(session, run_ids)
        except Exception as error:
            if not is_outage(error):
                logger.exception("access to open streams cannot be checked: closing them")
                return lambda _active: (None, None)
            logger.warning("access to open streams was not checked: %s", error)
            return None
        return lambda active: (all_grants.get(active.secret), projects.get(active.run_id or 0))


class ActiveRequestsMiddleware:
    """Middleware that registers each request for its duration."""

    def __init__(self, app: ASGIApp, active_requests: ActiveRequests) -> None:
        self.app, self.active_requests = app, active_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        active = ActiveRequest(asyncio.current_task())
        scope.setdefault("state", {})["active_request"] = active

        async def receive_while_allowed() -> Message:
            message = await receive()
            if active.is_over and not active.has_started:
                raise AccessRevoked
            if message.get("more_body"):
                self.active_requests.lasts(active)
            return message

        async def send_and_track(message: Message) -> None:
            active.has_started = True
            if message["type"] == "http.response.body":
                if message.get("more_body"):
                    self.active_requests.lasts(active)
                else:
                    self.active_requests.leave(active)
            await send(message)

        try:
            await self.app(scope, receive_while_allowed, send_and_track)
        except asyncio.CancelledError:
            if not active.is_over or active.task is None:
                raise
            active.task.uncancel()
            await _abort(scope, receive)
        finally:
            self.active_requests.leave(active)


async def _abort(scope: Scope, receive: Receive) -> None:
    """Abort the connection, with data that the client has not read yet."""
    if abort := scope.get("extensions", {}).get(ABORT):
        abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def active_request_of(request: Request) -> ActiveRequest:
    """Return the registered request."""
    active: ActiveRequest = request.state.active_request
    return active
