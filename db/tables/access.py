"""Tables of access: accounts, projects, tokens, shared links, audit log."""

from sqlalchemy import ForeignKey, Index, false, true
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import Table

#: What a token may do: all that its user may, no more than some of it, or send watched runs, or one
#: of them, and nothing else.
FULL, READ, SUBMIT, CONTROL, WRITE, ONE_RUN = TOKENS = (
    *("full", "read", "submit", "control", "write", "run"),
)
#: Those that send, and do nothing else.
SENDING = (WRITE, ONE_RUN)


class User(Table):
    """A user, also a deactivated or removed one.

    key: the name as it is compared, so that no two look alike; see db.names.
    subject: what a provider of identities knows them by, its issuer before it.
    is_admin: everything is allowed, users and workers included.  runs_commands: command lines
    may be queued, where a worker offers them.
    deactivated_at: since when they may not sign in; removed_at: since when they are gone for good,
    and their name stands by what they did alone.
    """

    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    key: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str | None]
    subject: Mapped[str | None] = mapped_column(unique=True)
    is_admin: Mapped[bool] = mapped_column(default=False, server_default=false())
    runs_commands: Mapped[bool] = mapped_column(default=False, server_default=false())
    deactivated_at: Mapped[float | None]
    removed_at: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=now())


class Project(Table):
    """What runs belong to, and people have roles in. "" is the one that there always is.

    viewers_download: whether a viewer may download, not only look.  devices, queued, stored_gib:
    what its runs may use: devices in training at once, places in the queue, and of the store; null
    is no limit.  share: of two projects, that with the fewer devices for its share goes first.
    """

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(primary_key=True)
    viewers_download: Mapped[bool] = mapped_column(default=True, server_default=true())
    devices: Mapped[int | None]
    queued: Mapped[int | None]
    stored_gib: Mapped[float | None]
    share: Mapped[float] = mapped_column(default=1.0, server_default="1.0")
    created_at: Mapped[float] = mapped_column(default=now())


class Membership(Table):
    """A role in a project: viewer, member or maintainer; see db.access.permissions."""

    __tablename__ = "memberships"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[str]


class SignInLink(Table):
    """A one-time sign-in link; only the hash of its token is stored."""

    __tablename__ = "sign_in_links"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    expires_at: Mapped[float]


class SignInSession(Table):
    """A browser session; only the hash of its cookie is stored. by_link: not by a password."""

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    csrf_token: Mapped[str]
    by_link: Mapped[bool] = mapped_column(default=False, server_default=false())
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float]


class LoginAttempts(Table):
    """Failed sign-in attempts. kind: address or name; who: its value."""

    __tablename__ = "login_attempts"
    __table_args__ = (Index("ix_login_attempts_tried_at", "tried_at"),)

    kind: Mapped[str] = mapped_column(primary_key=True)
    who: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(default=0)
    tried_at: Mapped[float] = mapped_column(default=now())
    open_at: Mapped[float] = mapped_column(default=0.0)


class Secret(Table):
    """An encrypted environment variable of commands; see db.access.secrets."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    ciphertext: Mapped[str]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    set_at: Mapped[float] = mapped_column(default=now())


class ApiToken(Table):
    """An API token; only its hash is stored.

    kind: one of TOKENS.  project: the only one that it opens.  run_id: the only watched run that it
    sends.  expires_at: null: never.
    """

    __tablename__ = "api_tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(default=FULL, server_default=FULL)
    project: Mapped[str | None]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float | None]
    used_at: Mapped[float | None]


class SharedLink(Table):
    """A read-only link to runs; only the hash of its secret is stored.

    user_id: of its maker, who has to be one who may share these runs.
    """

    __tablename__ = "shared_links"

    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float]


class SharedRun(Table):
    """A run that a read-only link shows. place: among those of the link."""

    __tablename__ = "shared_runs"

    link_id: Mapped[int] = mapped_column(ForeignKey("shared_links.id"), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True, index=True)
    place: Mapped[int]


class AuditEvent(Table):
    """An audit event: who changed what, when and from where. Rows are never changed or deleted.

    user_id: null of who typed it on the server's machine, or tried to sign in as nobody.
    token: the name of the one that a script came with.  deed: method and path.  detail: of what was
    sent the fields that the route names, never a secret.  run_id: of the run that it was done to,
    which may no longer exist.
    """

    __tablename__ = "audit_events"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(default=now(), index=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"), index=True)
    token: Mapped[str | None]
    action: Mapped[str]
    detail: Mapped[str] = mapped_column(default="", server_default="")
    run_id: Mapped[int | None] = mapped_column(index=True)
    address: Mapped[str]
