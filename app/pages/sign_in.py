"""Coming in and going out."""

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from app.auth import Forgery, SignedIn, cookie_of, is_secure, local_path, sign_in
from app.brake import TooManyTries, client_of
from app.context import Db, Hashing, TheBrake, TheDatabase
from app.parameters import Text
from app.rendering import page
from db import accounts
from db.errors import Refused

router = APIRouter()

#: What the page may say of a refusal elsewhere, by the code in its address.
PROBLEMS = {"link": accounts.LINK_REFUSED}


@router.get("/")
def enter(request: Request, token: str = "", next: str = "") -> Response:  # noqa: A002
    """Lead to the runs; whoever opens a link is asked to go on, which a chat's preview does not."""
    target = local_path(next) if next else "/runs"
    if not token:
        return RedirectResponse(target, status_code=303)
    return page(request, "link.html", token=token, next=target)


@router.post("/")
def redeem_link(
    request: Request,
    database: TheDatabase,
    token: Annotated[Text, Form()] = "",
    next: Annotated[str, Form()] = "/runs",  # noqa: A002
) -> Response:
    """Sign in by a link, unless another site sent the browser here."""
    _check_came_from_here(request)
    response = RedirectResponse(local_path(next), status_code=303)
    try:
        with database.writing() as session:
            user = accounts.redeem_link_token(session, token)
            sign_in(request, response, session, user, by_link=True)
    except Refused:
        return RedirectResponse("/sign-in?problem=link", status_code=303)
    return response


@router.get("/sign-in")
def sign_in_page(request: Request, next: str = "/", problem: str = "") -> Response:  # noqa: A002
    """Ask for name and password. problem: a code of PROBLEMS."""
    known = PROBLEMS.get(problem, "")
    return page(request, "sign_in.html", next=local_path(next), problem=known, name="")


@router.post("/sign-in")
def sign_in_with_password(
    request: Request,
    _hashing: Hashing,
    database: TheDatabase,
    brake: TheBrake,
    name: Annotated[Text, Form()] = "",
    password: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",  # noqa: A002
) -> Response:
    """Sign a browser in, unless another site sent it here.

    Argon2 takes its time on purpose, so nobody's write waits for it: the password is verified
    before the transaction that writes the new session.
    """
    _check_came_from_here(request)
    target = local_path(next)
    client = client_of(request, name)
    try:
        brake.take(**client)
        with database.reading() as session:
            user = accounts.check_password(session, name, password)
    except (Refused, TooManyTries) as error:
        answer = page(
            request,
            "sign_in.html",
            status_code=429 if isinstance(error, TooManyTries) else 401,
            next=target,
            problem=str(error),
            name=name,
        )
        if isinstance(error, TooManyTries):
            answer.headers["Retry-After"] = str(error.seconds)
        return answer
    brake.release(**client)
    with database.writing() as session:
        welcome = RedirectResponse(target, status_code=303)
        sign_in(request, welcome, session, user)
    return welcome


def _check_came_from_here(request: Request) -> None:
    """See that no other site signs a browser in as somebody else. Raises Forgery.

    Over plain HTTP browsers do not say where they come from but by Origin; one that says nothing at
    all is believed no more than one that comes from elsewhere.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_other = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if site not in ("same-origin", "none", None) or is_other or (site is None and origin is None):
        raise Forgery


@router.post("/sign-out")
def sign_out(request: Request, session: Db, _visitor: SignedIn) -> Response:
    """End this browser's session."""
    name = cookie_of(request)
    accounts.end_session(session, request.cookies.get(name, ""))
    response = RedirectResponse("/sign-in", status_code=303)
    response.delete_cookie(name, secure=is_secure(request))
    return response


@router.get("/healthz")
def healthz(database: TheDatabase) -> Response:
    """Tell whether server and database answer, for a container's health check."""
    database.check()
    return JSONResponse({"status": "ok"})
