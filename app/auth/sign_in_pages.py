"""Coming in and going out."""

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from app.auth import audit
from app.auth.authentication import (
    NoPasswords,
    SignedIn,
    check_came_from_here,
    cookie_of,
    is_secure,
    local_path,
    sign_in,
)
from app.auth.login_throttling import client_of
from app.auth.permissions import ACCOUNT, requires
from app.auth.sso import MINUTES, Claims, Provider, SsoFailed
from app.dependencies import Db, Hashing, TheDatabase, TheSettings
from app.html.rendering import page
from app.http.parameters import Text
from db.access import accounts, login_attempts, oidc_role_mapping
from db.access.login_attempts import TooManyAttempts
from db.errors import InvalidCredentials, NotFound
from db.settings import Settings

router = APIRouter()

SSO_COOKIE = "halfstep-sso"


def _provider(request: Request) -> Provider:
    found: Provider | None = request.app.state.sso
    if found is None:
        raise NotFound("This server has no provider of identities.")
    return found


TheProvider = Annotated[Provider, Depends(_provider)]

#: What the page may say of a refusal elsewhere, by the code in its address.
PROBLEMS = {"link": accounts.LINK_REFUSED}


@router.get("/")
def enter(request: Request, token: str = "", next: str = "") -> Response:  # noqa: A002
    """Lead to the runs; whoever opens a link is asked to go on, which a chat's preview does not."""
    target = local_path(next) if next else "/runs"
    if not token:
        return RedirectResponse(target, status_code=303)
    return page(request, "compare/sign_in_link.html", token=token, next=target)


@router.post("/")
def redeem_link(
    request: Request,
    database: TheDatabase,
    token: Annotated[Text, Form()] = "",
    next: Annotated[str, Form()] = "/runs",  # noqa: A002
) -> Response:
    """Sign in by a link, unless another site sent the browser here."""
    check_came_from_here(request)
    response = RedirectResponse(local_path(next), status_code=303)
    try:
        with database.writing() as session:
            user = accounts.redeem_link_token(session, token)
            sign_in(request, response, session, user, by_link=True)
            audit.note_now(session, request, user, "signed in by a link")
    except InvalidCredentials:
        refused = BackgroundTask(audit.note_refusal, database, request)
        return RedirectResponse("/sign-in?problem=link", status_code=303, background=refused)
    return response


@router.get("/sign-in")
def sign_in_page(
    request: Request,
    settings: TheSettings,
    next: str = "/",  # noqa: A002
    problem: str = "",
) -> Response:
    """Ask for name and password. problem: a code of PROBLEMS."""
    known = PROBLEMS.get(problem, "")
    return _sign_in_page(request, settings, target=local_path(next), problem=known)


def _sign_in_page(
    request: Request,
    settings: Settings,
    *,
    target: str = "/",
    problem: str = "",
    name: str = "",
    status_code: int = 200,
) -> Response:
    return page(
        request,
        "auth/sign_in.html",
        status_code=status_code,
        next=target,
        problem=problem,
        name=name,
        has_passwords=settings.password_login,
        has_sso=bool(settings.oidc_issuer),
    )


@router.get("/sign-in/sso")
def begin_sso(request: Request, sso: TheProvider, next: str = "/") -> Response:  # noqa: A002
    """Lead to the provider of identities."""
    address, cookie = sso.begin(local_path(next))
    response = RedirectResponse(address, status_code=303)
    # Lax: the provider's redirect brings it back.
    response.set_cookie(
        SSO_COOKIE,
        cookie,
        max_age=MINUTES * 60,
        httponly=True,
        samesite="lax",
        secure=is_secure(request),
        path="/sign-in/sso",
    )
    return response


Answered = tuple[Claims, str] | SsoFailed


async def _answered(
    request: Request, sso: TheProvider, code: Text = "", state: Text = "", error: Text = ""
) -> Answered:
    """Return whom the provider has signed in and where to go, or what is wrong: before the turn
    with the database, which nobody is to hold while the provider takes its time.
    """
    try:
        if error or not code:
            raise SsoFailed(f"The provider refused: {error[:100] or 'it sent no code'}.")
        cookie = request.cookies.get(SSO_COOKIE, "")
        return await run_in_threadpool(sso.finish, cookie, state, code)
    except SsoFailed as failure:
        return failure


@router.get("/sign-in/sso/answer")
def finish_sso(
    request: Request,
    answered: Annotated[Answered, Depends(_answered)],
    database: TheDatabase,
    settings: TheSettings,
) -> Response:
    """Sign in whom the provider has, with the roles of their groups."""
    try:
        if isinstance(answered, SsoFailed):
            raise answered
        claims, target = answered
        response: Response = RedirectResponse(local_path(target), status_code=303)
        with database.writing() as session:
            user = accounts.user_of_subject(session, claims.subject, claims.name)
            oidc_role_mapping.apply(
                session, user, oidc_role_mapping.parsed(settings.oidc_roles), claims.groups
            )
            sign_in(request, response, session, user)
            audit.note_now(session, request, user, "signed in by the provider")
    except (SsoFailed, InvalidCredentials) as failure:
        response = _sign_in_page(request, settings, problem=str(failure), status_code=401)
        response.background = BackgroundTask(audit.note_refusal, database, request)
    response.delete_cookie(SSO_COOKIE, path="/sign-in/sso")
    return response


@router.post("/sign-in")
def sign_in_with_password(
    request: Request,
    _hashing: Hashing,
    database: TheDatabase,
    settings: TheSettings,
    name: Annotated[Text, Form()] = "",
    password: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",  # noqa: A002
) -> Response:
    """Sign a browser in, unless another site sent it here.

    Argon2 takes its time on purpose, so nobody's write waits for it: the password is verified
    before the transaction that writes the new session.
    """
    check_came_from_here(request)
    if not settings.password_login:
        raise NoPasswords
    target = local_path(next)
    client = client_of(request, name)
    try:
        with database.writing() as session:
            login_attempts.take(session, **client)
        with database.reading() as session:
            user = accounts.check_password(session, name, password)
    except (InvalidCredentials, TooManyAttempts) as error:
        answer = _sign_in_page(
            request,
            settings,
            status_code=429 if isinstance(error, TooManyAttempts) else 401,
            target=target,
            problem=str(error),
            name=name,
        )
        if isinstance(error, TooManyAttempts):
            answer.headers["Retry-After"] = str(error.seconds)
        else:
            answer.background = BackgroundTask(audit.note_refusal, database, request, name)
        return answer
    with database.writing() as session:
        login_attempts.release(session, **client)
        welcome = RedirectResponse(target, status_code=303)
        sign_in(request, welcome, session, user)
        audit.note_now(session, request, user, "signed in by a password")
    return welcome


@router.post("/sign-out")
@requires(ACCOUNT)
def sign_out(request: Request, session: Db, _principal: SignedIn) -> Response:
    """End this browser's session."""
    name = cookie_of(request)
    accounts.end_session(session, request.cookies.get(name, ""))
    response = RedirectResponse("/sign-in", status_code=303)
    response.delete_cookie(name, secure=is_secure(request))
    return response
