"""Authentication: browsers by session cookie, scripts by API token.

Browsers attach cookies to requests that other sites trigger, so a change with a cookie must also
carry the session's CSRF token. A script sends its token deliberately.
"""

import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import BackgroundTasks, Depends, Request, Response
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app.auth import audit
from app.auth.permissions import access_of, admit
from app.dependencies import SAFE_METHODS, Db, Posted
from app.http.active_requests import ActiveRequests, active_request_of
from app.http.credentials import bearer_token, cookie_of, is_secure
from app.http.parameters import check_known
from db.access import accounts, permissions
from db.access.permissions import Grants, Permission
from db.database import Database
from db.errors import HalfstepError
from db.runs import runs
from db.tables import FULL, LARGEST_ID, ONE_RUN, SENDING, WRITE, Run, SignInSession, User

logger = logging.getLogger(__name__)


class SignInNeeded(HalfstepError):
    """Sign in first, or send an API token as "Authorization: Bearer ..."."""


class UnknownToken(SignInNeeded):
    """The token is unknown or has expired. Make another one on the account page."""

    code = "sign_in_needed"


class CsrfError(HalfstepError):
    """This request did not come from a page of this server. Reload the page and try again."""


class NotForScripts(HalfstepError):
    """An API token gives no access to the account or to new tokens: sign in with a browser."""


class NotForSending(HalfstepError):
    """This token may not upload this run: check its scope, project and run, or create another."""


class NoPasswords(HalfstepError):
    """Password login is disabled: sign in by single sign-on or with a link."""


class WriteOnly(HalfstepError):
    """This token may only upload watched runs: create another one on the account page."""


class LinkNeeded(HalfstepError):
    """This read-only link has ended, or is not open in this browser: open it or request another."""


@dataclass(frozen=True)
class Principal:
    """A signed-in user: a browser with `sign_in`, or a script with a token."""

    user: User
    grants: Grants
    sign_in: SignInSession | None = None
    may_upload: bool = True  # watched runs; not with a token of another scope

    @property
    def anywhere(self) -> str:
        """Permissions in at least one project, which decide what pages offer."""
        permissions = (p for p in Permission if self.grants.may_in_any_project(p))
        return " ".join(sorted(permissions))

    def permissions(self, run: Run) -> set[str]:
        """Return the permissions on a run, which decide what its page offers."""
        may = self.grants.may
        return {
            str(permission)
            for permission in Permission
            if may(permission, run.project, run.owner_id)
        }

    def destinations(self, projects: Iterable[str]) -> list[str]:
        """Return the projects among these to which runs can be moved, if there are at least two."""
        names = sorted(name for name in projects if self.grants.may(Permission.MOVE_RUN, name))
        return names if len(names) > 1 else []

    @property
    def csrf_token(self) -> str:
        """CSRF token that changes by a browser must carry; empty for scripts."""
        return self.sign_in.csrf_token if self.sign_in else ""


def require_sign_in(
    request: Request,
    session: Db,
    posted: Posted,
    detail: audit.Detail,
    background: BackgroundTasks,
) -> Principal:
    """Authenticate a request, check what its route requires, and record it in the audit log."""
    token = bearer_token(request)
    if token is not None:
        known = _full_token(request, session, token)
        if not known.is_noted and request.method not in SAFE_METHODS:
            accounts.note_use(session, token)
        elif not known.is_noted:
            _note_later(request, token, background)
        principal = _admit(request, session, token, known)
        return _audit(request, session, principal, detail, known.name)
    principal = _by_cookie(request, session, str(posted.get("csrf_token", "")))
    return _audit(request, session, principal, detail)


def _full_token(request: Request, session: Session, token: str) -> accounts.KnownToken:
    known = accounts.find_api_token(session, token)
    if known is None:
        raise UnknownToken
    is_for_uploads = known.kind == WRITE and access_of(request.scope["endpoint"]).for_uploads
    if known.kind in SENDING and not is_for_uploads:
        raise WriteOnly
    return known


def _by_cookie(request: Request, session: Session, posted_token: str = "") -> Principal:
    secret = request.cookies.get(cookie_of(request), "")
    known = accounts.find_session(session, secret)
    if known is None:
        raise SignInNeeded
    if request.method not in SAFE_METHODS:
        sent = request.headers.get("x-csrf-token") or posted_token
        if not hmac.compare_digest(sent.encode(), known.sign_in.csrf_token.encode()):
            raise CsrfError
    return _admit(request, session, secret, known)


def _admit(
    request: Request,
    session: Session,
    secret: str,
    known: accounts.KnownSession | accounts.KnownToken,
) -> Principal:
    """Authorize a request and limit its session to the principal's visible projects.

    Long requests are registered, so that they end when the secret is no longer valid.
    """
    if isinstance(known, accounts.KnownToken):
        sign_in, kind, only = None, known.kind, known.project
    else:
        sign_in, kind, only = known.sign_in, FULL, None
    permissions.limit(session, known.grants)
    admit(request, session, known.user, known.grants, kind, only)
    check_known(request)
    active_requests: ActiveRequests = request.app.state.active_requests
    lasts = access_of(request.scope["endpoint"]).lasts
    active_requests.admit(active_request_of(request), known.grants, secret, lasts, _run_id(request))
    return Principal(known.user, known.grants, sign_in, may_upload=kind in (FULL, *SENDING))


def _audit(
    request: Request, session: Session, principal: Principal, detail: str, token: str | None = None
) -> Principal:
    """Record changes in the audit log, in the same transaction."""
    if request.method not in SAFE_METHODS:
        audit.record(session, principal.user, request, token, detail)
    return principal


async def _sender(request: Request, background: BackgroundTasks) -> User:
    """Return the sender of a watched run, before its body is read and without holding a session."""
    token, database = bearer_token(request), request.app.state.database
    if token is None:
        raise SignInNeeded
    async with request.app.state.turns:
        known = await run_in_threadpool(_find_token, database, token)
        if known is None:
            raise UnknownToken
        if known.project is not None or known.run_id is not None:
            await run_in_threadpool(_check_run, database, request, known)
    if known.kind not in (FULL, *SENDING):
        raise NotForSending
    request.state.known, request.state.token = known, known.name
    active_requests: ActiveRequests = request.app.state.active_requests
    active_requests.note_valid(token)
    if not known.is_noted:
        _note_later(request, token, background)
    return known.user


def _check_run(database: Database, request: Request, known: accounts.KnownToken) -> None:
    """Check that a token of one project or run uploads no other run. Raises NotForSending."""
    run_id = _run_id(request)
    if run_id is not None:
        with database.read_only() as session:
            project = runs.projects_of(session, [run_id]).get(run_id)
        if project is not None and not known.grants.may(Permission.SUBMIT_RUN, project):
            project = None  # as for a missing run
        check_may_upload(known, run_id, project)


def _run_id(request: Request) -> int | None:
    """Return the run id of the path, or None if there is no valid one."""
    text = str(request.path_params.get("run_id", ""))
    is_id = text.isdecimal() and len(text) <= len(str(LARGEST_ID)) and int(text) <= LARGEST_ID
    return int(text) if is_id else None


def check_may_upload(known: accounts.KnownToken, run_id: int | None, project: str | None) -> None:
    """Check that a token may upload a run. Raises NotForSending. run_id: None for a new run."""
    is_its_run = known.kind != ONE_RUN or known.run_id == run_id
    if not is_its_run or known.project not in (None, project):
        raise NotForSending


def _find_token(database: Database, token: str) -> accounts.KnownToken | None:
    with database.read_only() as session:
        return accounts.find_api_token(session, token)


#: The sender of a watched run, by a token of either kind.
Sender = Annotated[User, Depends(_sender)]


async def _uploader(request: Request, background: BackgroundTasks) -> User:
    """Return the uploader of a file, before its body is read and without holding a session."""
    token, database = bearer_token(request), request.app.state.database
    async with request.app.state.turns:
        user, is_noted = await run_in_threadpool(_authorize, request, database, token)
    if token is not None and not is_noted:
        _note_later(request, token, background)
    return user


def _authorize(
    request: Request, database: Database, token: str | None, posted_token: str = ""
) -> tuple[User, bool]:
    with database.reading() as session:
        if token is None:
            principal = _by_cookie(request, session, posted_token)
            request.state.grants = principal.grants
            return principal.user, True
        known = _full_token(request, session, token)
        request.state.token, request.state.token_project = known.name, known.project
        principal = _admit(request, session, token, known)
        request.state.grants = principal.grants
        return principal.user, known.is_noted


#: The uploader of weights: a browser, or a script with a token that may submit.
Uploader = Annotated[User, Depends(_uploader)]


async def _admit_early(request: Request, posted: Posted) -> User:
    """Authorize a request before its session opens, for a check that waits for the network."""
    token, database = bearer_token(request), request.app.state.database
    posted_token = str(posted.get("csrf_token", ""))
    async with request.app.state.turns:
        user, _is_noted = await run_in_threadpool(
            _authorize, request, database, token, posted_token
        )
    return user


AdmittedEarly = Annotated[User, Depends(_admit_early)]


def principal_of(request: Request) -> Principal | None:
    """Return the principal of a browser, for an error page; None if it is not signed in.

    Read again: the failed request may not have signed in, and its transaction is over.
    """
    secret = request.cookies.get(cookie_of(request), "")
    if not secret:
        return None
    database: Database = request.app.state.database
    try:
        with database.reading() as session:
            known = accounts.find_session(session, secret)
            return Principal(known.user, known.grants, known.sign_in) if known else None
    except DBAPIError:
        return None


def _note_later(request: Request, token: str, background: BackgroundTasks) -> None:
    database: Database = request.app.state.database
    noting: set[str] = request.app.state.noting
    if token not in noting:
        background.add_task(_note_use, database, token, noting)


def _note_use(database: Database, token: str, noting: set[str]) -> None:
    """Record the use of a token after the response, so that reads wait for no write.

    noting: tokens that another thread records already; more would wait for the same lock.
    """
    if token in noting:
        return
    noting.add(token)
    try:
        with database.writing() as session:
            accounts.note_use(session, token)
    except DBAPIError as error:
        logger.warning("the use of a token was not recorded: %s", error.orig)
    finally:
        noting.discard(token)


SignedIn = Annotated[Principal, Depends(require_sign_in)]


def _at_browser(principal: SignedIn) -> SignInSession:
    """Refuse scripts: a stolen token must not create tokens, links or accounts."""
    if principal.sign_in is None:
        raise NotForScripts
    return principal.sign_in


#: The browser's session; a token gets 403.
AtBrowser = Annotated[SignInSession, Depends(_at_browser)]


def sign_in(
    request: Request, response: Response, session: Session, user: User, *, by_link: bool = False
) -> None:
    """Start a session and give its secret to the browser."""
    secret, _row = accounts.start_session(session, user, by_link=by_link)
    response.set_cookie(
        cookie_of(request),
        secret,
        max_age=int(accounts.SESSION_SECONDS),
        httponly=True,
        samesite="lax",
        secure=is_secure(request),
    )


def check_came_from_here(request: Request) -> None:
    """Check that a sign-in comes from a page of this server. Raises CsrfError.

    Over plain HTTP browsers send Origin only; a request without any origin is refused, too.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_other = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if site not in ("same-origin", "none", None) or is_other or (site is None and origin is None):
        raise CsrfError


def local_path(address: str) -> str:
    """Return the path to redirect to after sign-in, if it is a local one; else "/".

    "//host" and "/\\host" lead to other sites.
    """
    is_ours = address.startswith("/") and address[1:2] not in ("/", "\\") and address.isprintable()
    return address if is_ours else "/"
