"""Accounts: users, one-time links, sessions, API tokens. Secrets are stored as hashes only."""

import hashlib
import secrets
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

from pwdlib import PasswordHash
from sqlalchemy import bindparam, delete, func, literal, null, select, union_all, update
from sqlalchemy.orm import Session

from db import clock
from db.access import permissions, projects
from db.access.permissions import MEMBER, Grants, Permission
from db.clock import now
from db.errors import Conflict, Invalid, InvalidCredentials
from db.names import check_name, key_of, without_invisible
from db.paging import Page, page
from db.tables import (
    FULL,
    ONE_RUN,
    TOKENS,
    WATCH,
    ApiToken,
    ChartPreferences,
    Membership,
    Project,
    Run,
    SharedLink,
    SharedRun,
    SignInLink,
    SignInSession,
    User,
)
from halfstep.number_formats import duration

#: Condition of a user who may sign in.
IS_ACTIVE = User.deactivated_at.is_(None)
DAY = 24 * 3600.0
SESSION_SECONDS = 30 * DAY
#: Lifetime of a token: default and maximum.
TOKEN_DAYS, MOST_TOKEN_DAYS = 90, 3650
#: Interval at which the use of a token is recorded.
USE_NOTED_SECONDS = 60.0
LINK_SECONDS = 24 * 3600.0
#: After a sign-in by link no password is required for this long.
FRESH_SECONDS = 600.0
PASSWORD_LENGTH = (8, 200)
NAME_CHARACTERS = 64
#: Limit of tokens per user.
MOST_TOKENS = 50
#: Expiry of links that stay valid as long as their server runs.
LASTING = 1e12
LINK_REFUSED = "This sign-in link has been used or has expired. Sign in below instead."

_passwords = PasswordHash.recommended()


def user_named(session: Session, name: str) -> User:
    """Return the user of that name, created if missing. Raises Invalid.

    The first user becomes an admin, later ones become members of the Default project.
    """
    user = find_user(session, name)
    if user is None:
        is_first = not has_users(session)
        user = make_user(session, name, is_admin=is_first)
        if not is_first:
            projects.set_role(session, user, projects.DEFAULT, MEMBER)
    return user


def has_users(session: Session) -> bool:
    """Return whether there are accounts, removed ones included."""
    return session.scalar(select(User.id).limit(1)) is not None


def find_user(session: Session, name: str) -> User | None:
    """Return the user of a name, independent of its spelling; see db.names."""
    return session.scalar(select(User).where(User.key == key_of(name)))


def user_of_subject(session: Session, subject: str, name: str) -> User:
    """Return the user of an OIDC subject, created if there is none.

    The name of another account is not taken over: its owner may be another person. Raises
    InvalidCredentials.
    """
    user = session.scalar(select(User).where(User.subject == subject))
    if user is None:
        shown = without_invisible(name)[:NAME_CHARACTERS]
        if find_user(session, shown) is not None:
            message = f"The account {shown!r} is not linked to the provider. An admin can "
            raise InvalidCredentials(f"{message}link it by halfstep user subject.")
        try:
            user = make_user(session, shown)
        except Invalid as error:
            raise InvalidCredentials(
                f"Your user name at the provider is not valid here: {error}."
            ) from error
        user.subject = subject
    if user.deactivated_at is not None:
        raise InvalidCredentials("This account is deactivated. Ask an admin.")
    return user


def first_admin(session: Session) -> User | None:
    """Return the first admin."""
    query = select(User).where(User.is_admin, IS_ACTIVE).order_by(User.id)
    return session.scalar(query.limit(1))


def make_user(session: Session, name: str, *, is_admin: bool = False) -> User:
    """Create an account without credentials. Raises Invalid."""
    name = check_name(name, most=NAME_CHARACTERS)
    if (other := find_user(session, name)) is not None:
        taken = f"{name!r} is not free: there is a user {other.name!r} already"
        raise Invalid({"name": f"{taken}; allowed: a name that differs in more than case"})
    user = User(name=name, key=key_of(name), is_admin=is_admin)
    session.add(user)
    session.flush()
    return user


def deactivate(session: Session, user: User) -> None:
    """Deactivate a user; sessions, tokens and links end at once. Raises Conflict."""
    _keep_an_admin(session, user)
    user.deactivated_at = clock.current(session)
    _shut_out(session, user)


def reactivate(session: Session, user: User) -> None:
    """Reactivate a user."""
    user.deactivated_at = None


def reset(session: Session, user: User) -> None:
    """Reset a user's password; sessions, tokens and links end at once."""
    user.password_hash = None
    _shut_out(session, user)


def remove(session: Session, user: User) -> None:
    """Remove an account for good; its runs and audit events keep its name. Raises Conflict."""
    deactivate(session, user)
    user.removed_at, user.password_hash, user.is_admin = user.deactivated_at, None, False
    for table in (Membership, ChartPreferences):
        session.execute(delete(table).where(table.user_id == user.id))


def set_admin(session: Session, user: User, *, is_admin: bool) -> None:
    """Make a user admin, or remove admin. Raises Conflict for the last admin."""
    if not is_admin:
        _keep_an_admin(session, user)
    user.is_admin = is_admin


def _keep_an_admin(session: Session, user: User) -> None:
    active = (User.is_admin, User.deactivated_at.is_(None))
    # Concurrent removals are serialized.
    admins = session.scalars(select(User.id).where(*active).with_for_update()).all()
    if list(admins) == [user.id]:
        raise Conflict(f"{user.name} is the last admin: make another user an admin first.")


def _shut_out(session: Session, user: User) -> None:
    shown = select(SharedLink.id).where(SharedLink.user_id == user.id)
    session.execute(delete(SharedRun).where(SharedRun.link_id.in_(shown)))
    for table in (SignInSession, ApiToken, SignInLink, SharedLink):
        session.execute(delete(table).where(table.user_id == user.id))


def set_password(session: Session, user: User, password: str) -> None:
    """Set a password, and end all sessions, tokens and links of the user.

    Raises Invalid if it is too short.
    """
    low, high = PASSWORD_LENGTH
    if not low <= len(password) <= high:
        message = f"has {len(password)} characters; allowed: {low} to {high}"
        raise Invalid({"password": message})
    user.password_hash = _passwords.hash(password)
    _shut_out(session, user)


def is_recent_link_sign_in(session: Session, sign_in: SignInSession) -> bool:
    """Return whether a browser signed in by a link within the last few minutes."""
    age = clock.current(session) - sign_in.created_at
    return sign_in.by_link and age < FRESH_SECONDS


def needs_current_password(session: Session, user: User, sign_in: SignInSession) -> bool:
    """Return whether a user has to repeat the current password to set another.

    Not after a recent sign-in by link, nor by any link while no password is set.
    """
    if user.password_hash is None and sign_in.by_link:
        return False
    return not is_recent_link_sign_in(session, sign_in)


def check_current_password(user: User, password: str) -> None:
    """Verify the current password of a signed-in user. Raises Invalid."""
    if user.password_hash is None:
        message = (
            f"is not set yet, and your sign-in link is older than {duration(FRESH_SECONDS)}; sign "
            "in with a new link"
        )
        raise Invalid({"current": f"{message}: sign in with a new one (halfstep link {user.name})"})
    if not _passwords.verify(password, user.password_hash):
        raise Invalid({"current": "is not your current password"})


def make_link_token(session: Session, user: User, *, is_lasting: bool = False) -> str:
    """Return the token of a link that signs in once, within a day; is_lasting: always."""
    token = secrets.token_urlsafe(32)
    session.execute(delete(SignInLink).where(SignInLink.expires_at < now()))
    expires_at = LASTING if is_lasting else now() + LINK_SECONDS
    session.add(SignInLink(token_hash=hash_of(token), user_id=user.id, expires_at=expires_at))
    return token


def redeem_link_token(session: Session, token: str) -> User:
    """Return the user of a link, and invalidate it if it is a one-time link.

    Raises InvalidCredentials.
    """
    own = SignInLink.token_hash == hash_of(token)
    user_id = session.scalar(
        delete(SignInLink)
        .where(own, SignInLink.expires_at > now(), SignInLink.expires_at < LASTING)
        .returning(SignInLink.user_id)
    )
    user = session.get_one(User, user_id) if user_id else lasting_link_user(session, token)
    if user is None:
        raise InvalidCredentials(LINK_REFUSED)
    return user


def link_user(session: Session, token: str) -> User | None:
    """Return the user whom a link signs in, or None."""
    valid = SignInLink.token_hash == hash_of(token), SignInLink.expires_at > now()
    links = select(SignInLink.user_id).where(*valid)
    return session.scalar(select(User).where(User.id.in_(links)))


def lasting_link_user(session: Session, token: str) -> User | None:
    """Return the user of a link that always signs in, or None."""
    links = select(SignInLink.user_id).where(
        SignInLink.token_hash == hash_of(token), SignInLink.expires_at >= LASTING
    )
    return session.scalar(select(User).where(User.id.in_(links)))


def check_password(session: Session, name: str, password: str) -> User:
    """Return the user of that name and password. Raises InvalidCredentials."""
    nobodys = _hash_of_nobodys()
    user = session.scalar(select(User).where(User.key == key_of(name), IS_ACTIVE))
    expected = user.password_hash if user and user.password_hash else nobodys
    if not _passwords.verify(password, expected) or user is None or expected is nobodys:
        raise InvalidCredentials("The name or the password is wrong.")
    return user


def start_session(
    session: Session, user: User, *, by_link: bool = False
) -> tuple[str, SignInSession]:
    """Sign a browser in; return the secret for its cookie and the session."""
    secret = secrets.token_urlsafe(32)
    row = SignInSession(
        token_hash=hash_of(secret),
        user_id=user.id,
        csrf_token=secrets.token_urlsafe(32),
        by_link=by_link,
        expires_at=now() + SESSION_SECONDS,
    )
    session.execute(delete(SignInSession).where(SignInSession.expires_at < now()))
    session.add(row)
    session.flush()
    return secret, row


class KnownSession(NamedTuple):
    """The user and grants of a session cookie."""

    user: User
    sign_in: SignInSession
    grants: Grants


def find_session(session: Session, secret: str) -> KnownSession | None:
    """Return the session of a cookie, or None if it is unknown or expired."""
    rows = session.execute(_by_session(), {"hash": hash_of(secret)}).all()
    if not rows:
        return None
    user, sign_in = rows[0][:2]
    return KnownSession(user, sign_in, permissions.grants_of(user, rows))


@cache  # slow to build, and every request needs it
def _by_session() -> Any:
    query = (
        select(User, SignInSession)
        .join(SignInSession, SignInSession.user_id == User.id)
        .where(SignInSession.token_hash == bindparam("hash"), SignInSession.expires_at > now())
        .where(IS_ACTIVE)
    )
    return permissions.with_roles(query)


def sign_ins(session: Session, user: User) -> list[SignInSession]:
    """Return a user's sessions, newest first."""
    mine = (SignInSession.user_id == user.id, SignInSession.expires_at > now())
    query = select(SignInSession).where(*mine).order_by(SignInSession.created_at.desc())
    return list(session.scalars(query.limit(100)))


def end_sign_ins(session: Session, user: User, *, but: SignInSession) -> None:
    """End a user's other sessions."""
    others = (SignInSession.user_id == user.id, SignInSession.token_hash != but.token_hash)
    session.execute(delete(SignInSession).where(*others))


def end_session(session: Session, secret: str) -> None:
    """Sign a browser out."""
    session.execute(delete(SignInSession).where(SignInSession.token_hash == hash_of(secret)))


def make_api_token(
    session: Session,
    user: User,
    name: str,
    kind: str = FULL,
    *,
    project: str | None = None,
    run_id: int | None = None,
    days: int | None = TOKEN_DAYS,
) -> tuple[str, ApiToken]:
    """Return a new API token, which cannot be read again, and its row. Raises Invalid.

    kind: one of TOKENS.  project: the only one it is valid for.  run_id: of a token for one run.
    days: until it expires; None: never.
    """
    if kind not in TOKENS:
        raise Invalid({"kind": f"{kind[:100]!r} is not valid; allowed: {', '.join(TOKENS)}"})
    if days is not None and not 1 <= days <= MOST_TOKEN_DAYS:
        raise Invalid({"days": f"{days} is not valid; allowed: 1 to {MOST_TOKEN_DAYS}, or none"})
    seen = permissions.grants(session, user).projects
    if project is not None and (
        session.get(Project, project) is None or (seen is not None and project not in seen)
    ):
        raise Invalid({"project": f"there is no project {project[:100]!r}; allowed: your projects"})
    if kind == ONE_RUN and not (run_id and _may_upload(session, user, run_id)):
        given = "none" if run_id is None else run_id
        allowed = "the number of a watched run that you may upload"
        raise Invalid({"run_id": f"{given} is not valid; allowed: {allowed}"})
    if kind != ONE_RUN and run_id is not None:
        raise Invalid({"run_id": f"{run_id} is not valid; allowed: none with the kind {kind}"})
    name = check_name(name, most=NAME_CHARACTERS)
    token = f"hs_{secrets.token_urlsafe(32)}"
    mine = select(func.count()).where(ApiToken.user_id == user.id)
    if (session.scalar(mine) or 0) >= MOST_TOKENS:
        raise Invalid({"name": f"you have {MOST_TOKENS} tokens, the maximum; revoke some first"})
    row = ApiToken(token_hash=hash_of(token), user_id=user.id, name=name, kind=kind)
    row.project, row.run_id = project, run_id
    row.expires_at = None if days is None else clock.current(session) + days * DAY
    session.add(row)
    session.flush()
    return token, row


def _may_upload(session: Session, user: User, run_id: int) -> bool:
    """Return whether a run is the user's own, watched, and in a project the user may submit to."""
    run = session.get(Run, run_id)
    is_own = run is not None and run.owner_id == user.id and run.deleted_at is None
    if run is None or not is_own or run.source != WATCH:
        return False
    return permissions.grants(session, user).may(Permission.SUBMIT_RUN, run.project)


def api_tokens(session: Session, user: User) -> list[ApiToken]:
    """List a user's tokens, newest first."""
    query = select(ApiToken).where(ApiToken.user_id == user.id).order_by(ApiToken.id.desc())
    return list(session.scalars(query))


def page_of_api_tokens(session: Session, user: User, *, after: str = "", limit: int) -> Page:
    """Return a page of a user's tokens, newest first."""
    query = select(ApiToken).where(ApiToken.user_id == user.id)
    return page(session, query, (ApiToken.id,), after=after, limit=limit, newest_first=True)


def delete_api_token(session: Session, user: User, token_id: int) -> str | None:
    """Revoke one of a user's own tokens; return its name, or None if there is none."""
    mine = delete(ApiToken).where(ApiToken.id == token_id, ApiToken.user_id == user.id)
    return session.scalar(mine.returning(ApiToken.name))


class KnownToken(NamedTuple):
    """A valid API token with its user and grants."""

    user: User
    grants: Grants
    name: str
    kind: str
    project: str | None
    run_id: int | None  # the only watched run that it may upload
    is_noted: bool  # a use within the last minute is recorded


def find_api_token(session: Session, token: str) -> KnownToken | None:
    """Return the user and grants of a token."""
    rows = session.execute(_by_token(), {"hash": hash_of(token)}).all()
    if not rows:
        return None
    user, name, kind, project, run_id, is_noted = rows[0][:6]
    grants = permissions.grants_of(user, rows, kind=kind, only=project)
    return KnownToken(user, grants, name, kind, project, run_id, bool(is_noted))


@cache  # as above
def _by_token() -> Any:
    recent = func.coalesce(ApiToken.used_at > now() - USE_NOTED_SECONDS, False)
    columns = (ApiToken.name, ApiToken.kind, ApiToken.project, ApiToken.run_id)
    query = select(User, *columns, recent).join(ApiToken, ApiToken.user_id == User.id)
    query = query.where(ApiToken.token_hash == bindparam("hash"), IS_ACTIVE)
    query = query.where(func.coalesce(ApiToken.expires_at > now(), True))
    return permissions.with_roles(query)


def all_grants(session: Session, hashes: Collection[str]) -> dict[str, Grants]:
    """Return the current grants of sessions and tokens, by the hash of the secret.

    Invalid ones are missing.
    """
    sign_in, token = SignInSession, ApiToken
    whose = (User.id, User.is_admin)
    queries = (
        select(sign_in.token_hash, *whose, literal(FULL), null())
        .join(User, User.id == sign_in.user_id)
        .where(sign_in.token_hash.in_(hashes), sign_in.expires_at > now(), IS_ACTIVE),
        select(token.token_hash, *whose, token.kind, token.project)
        .join(User, User.id == token.user_id)
        .where(token.token_hash.in_(hashes), func.coalesce(token.expires_at > now(), True))
        .where(IS_ACTIVE),
    )
    rows: Sequence[Any] = session.execute(union_all(*queries)).all()
    roles = permissions.of_users(session, {row[1] for row in rows if not row[2]})
    return {
        hash_: Grants(
            user_id, is_admin, roles.get(user_id, {}), permissions.PERMISSIONS_OF_TOKENS[kind], only
        )
        for hash_, user_id, is_admin, kind, only in rows
    }


def note_use(session: Session, token: str) -> None:
    """Record the current use of a token."""
    used = update(ApiToken).where(ApiToken.token_hash == hash_of(token))
    session.execute(used.values(used_at=now()))


@cache
def _hash_of_nobodys() -> str:
    """Return a hash to verify when the user does not exist, so that it takes the same time."""
    return _passwords.hash(secrets.token_urlsafe(16))


def hash_of(secret: str) -> str:
    """Return the stored hash of a secret."""
    # Secrets are 256 random bits, so a fast hash is enough: they cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()
