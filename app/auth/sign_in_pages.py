"""Sign-in by password, link or OIDC provider, and sign-out."""

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from app.auth import audit
from app.auth.authentication import NoPasswords, SignedIn, check_came_from_here, local_path, sign_in
from app.auth.login_throttling import client_of
from app.auth.permissions import ACCOUNT, requires
from app.auth.sso import MINUTES, Claims, Provider, SsoFailed
from app.dependencies import Db, Hashing, TheDatabase, TheSettings
from app.html.rendering import page
from app.http.credentials import cookie_of, is_secure
from app.http.parameters import FormText, Text
from db.access import accounts, login_attempts, oidc_role_mapping
from db.access.login_attempts import TooManyAttempts
from db.errors import InvalidCredentials, NotFound
from db.settings import Settings

router = APIRouter()

SSO_COOKIE = "halfstep-sso"


def _provider(request: Request) -> Provider:
    provider: Provider | None = request.app.state.sso
    if provider is None:
        raise NotFound("Single sign-on is not configured on this server.")
    return provider


TheProvider = Annotated[Provider, Depends(_provider)]

#: Error messages by the code in the page's URL.
PROBLEMS = {"link": accounts.LINK_REFUSED}


@router.get("/")
def enter(
    request: Request,
    database: TheDatabase,
    token: str = "",
    next: str = "",  # noqa: A002
) -> Response:
    """Redirect to the runs; a sign-in link shows a button first, since chats preview links.

    The link of `halfstep show` signs in at once: it leads to this machine and may only view.
    """
    target = local_path(next) if next else "/runs"
    response = RedirectResponse(target, status_code=303)
    if not token:
        return response
    with database.writing() as session:
        if viewer := accounts.lasting_link_user(session, token):
            sign_in(request, response, session, viewer, by_link=True)
            return response
        user = accounts.link_user(session, token)
        name = user.name if user else ""
    return page(request, "compare/sign_in_link.html", token=token, next=target, name=name)


@router.post("/")
def redeem_link(
    request: Request,
    database: TheDatabase,
    token: FormText = "",
    next: Annotated[str, Form()] = "/runs",  # noqa: A002
) -> Response:
    """Sign in by a link, unless another site sent the request."""
    check_came_from_here(request)
    response = RedirectResponse(local_path(next), status_code=303)
    try:
        with database.writing() as session:
            user = accounts.redeem_link_token(session, token)
            sign_in(request, response, session, user, by_link=True)
            audit.record_now(session, request, user, "signed in by a link")
    except InvalidCredentials:
        refused = BackgroundTask(audit.record_refusal, database, request)
        return RedirectResponse("/sign-in?problem=link", status_code=303, background=refused)
    return response


@router.get("/sign-in")
def sign_in_page(
    request: Request,
    settings: TheSettings,
    next: str = "/",  # noqa: A002
    problem: str = "",
) -> Response:
    """Show the form for name and password. problem: a code of PROBLEMS."""
    text = PROBLEMS.get(problem, "")
    return _sign_in_page(request, settings, target=local_path(next), problem=text)


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
    """Redirect to the OIDC provider."""
    address, cookie = sso.begin(local_path(next))
    response = RedirectResponse(address, status_code=303)
    # Lax: the provider's redirect must send it.
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


SsoResult = tuple[Claims, str] | SsoFailed


async def _sso_result(
    request: Request, sso: TheProvider, code: Text = "", state: Text = "", error: Text = ""
) -> SsoResult:
    """Return the provider's claims and the target path, or the error.

    A dependency, so that no turn with the database is held while the provider responds.
    """
    try:
        if error or not code:
            raise SsoFailed(f"The provider refused: {error[:100] or 'no code in its redirect'}.")
        cookie = request.cookies.get(SSO_COOKIE, "")
        return await run_in_threadpool(sso.finish, cookie, state, code)
    except SsoFailed as failure:
        return failure


@router.get("/sign-in/sso/answer")
def finish_sso(
    request: Request,
    result: Annotated[SsoResult, Depends(_sso_result)],
    database: TheDatabase,
    settings: TheSettings,
) -> Response:
    """Sign in the provider's user, with the roles of the user's groups."""
    try:
        if isinstance(result, SsoFailed):
            raise result
        claims, target = result
        response: Response = RedirectResponse(local_path(target), status_code=303)
        with database.writing() as session:
            user = accounts.user_of_subject(session, claims.subject, claims.name)
            oidc_role_mapping.apply(
                session, user, oidc_role_mapping.parse(settings.oidc_roles), claims.groups
            )
            sign_in(request, response, session, user)
            audit.record_now(session, request, user, "signed in by the provider")
    except (SsoFailed, InvalidCredentials) as failure:
        response = _sign_in_page(request, settings, problem=str(failure), status_code=401)
        response.background = BackgroundTask(audit.record_refusal, database, request)
    response.delete_cookie(SSO_COOKIE, path="/sign-in/sso")
    return response


@router.post("/sign-in")
def sign_in_with_password(
    request: Request,
    _hashing: Hashing,
    database: TheDatabase,
    settings: TheSettings,
    name: FormText = "",
    password: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",  # noqa: A002
) -> Response:
    """Sign a browser in by password, unless another site sent the request.

    Argon2 is slow on purpose, so the password is verified before the write transaction.
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
        response = _sign_in_page(
            request,
            settings,
            status_code=429 if isinstance(error, TooManyAttempts) else 401,
            target=target,
            problem=str(error),
            name=name,
        )
        if isinstance(error, TooManyAttempts):
            response.headers["Retry-After"] = str(error.seconds)
        else:
            response.background = BackgroundTask(audit.record_refusal, database, request, name)
        return response
    with database.writing() as session:
        login_attempts.release(session, **client)
        welcome = RedirectResponse(target, status_code=303)
        sign_in(request, welcome, session, user)
        audit.record_now(session, request, user, "signed in by a password")
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
