"""Tables of access: accounts, projects, tokens, shared links, audit log."""

from sqlalchemy import ForeignKey, Index, false, true
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import Table

#: Kinds of tokens: all permissions of the user, parts of them, uploads of watched runs, with
#: artifacts and sweeps of agents (write), or only uploads of one of them (run).
FULL, READ, SUBMIT, CONTROL, WRITE, ONE_RUN = TOKENS = (
    *("full", "read", "submit", "control", "write", "run"),
)
#: Kinds that upload watched runs; no other route takes them unless it declares `for_uploads`.
SENDING = (WRITE, ONE_RUN)


class User(Table):
    """A user, also a deactivated or removed one."""

    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    # Normalized name, so that no two names look alike; see db.names.
    key: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str | None]
    # Identity at an OIDC provider: issuer and subject.
    subject: Mapped[str | None] = mapped_column(unique=True)
    # Everything is allowed, including the administration of users and workers.
    is_admin: Mapped[bool] = mapped_column(default=False, server_default=false())
    # May queue command lines, if a worker offers commands.
    runs_commands: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Since then sign-in is refused.
    deactivated_at: Mapped[float | None]
    # Since then removed for good; the name remains only in records of past actions.
    removed_at: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=now())


class Project(Table):
    """A project: runs belong to it, and users have roles in it. "" is the Default project.

    A limit of null is no limit.
    """

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(primary_key=True)
    # Whether viewers may download files.
    viewers_download: Mapped[bool] = mapped_column(default=True, server_default=true())
    devices: Mapped[int | None]  # limit of devices in training at once
    queued: Mapped[int | None]  # limit of queued runs
    stored_gib: Mapped[float | None]  # limit of stored files
    # Weight in the queue: the project with the fewest devices per share goes first.
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
    """A browser session; only the hash of its cookie is stored."""

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    csrf_token: Mapped[str]
    # Signed in by a link instead of a password.
    by_link: Mapped[bool] = mapped_column(default=False, server_default=false())
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float]


class LoginAttempts(Table):
    """Failed sign-in attempts."""

    __tablename__ = "login_attempts"
    __table_args__ = (Index("ix_login_attempts_tried_at", "tried_at"),)

    kind: Mapped[str] = mapped_column(primary_key=True)  # address or name
    who: Mapped[str] = mapped_column(primary_key=True)  # its value
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
    """An API token; only its hash is stored."""

    __tablename__ = "api_tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(default=FULL, server_default=FULL)  # one of TOKENS
    project: Mapped[str | None]  # the only project that it gives access to
    # The only watched run that it may upload.
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float | None]  # null: never
    used_at: Mapped[float | None]


class SharedLink(Table):
    """A read-only link to runs or to a report; only the hash of its secret is stored."""

    __tablename__ = "shared_links"

    id: Mapped[int] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    # The creator, who must still have permission to share these runs.
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    # The report that it shows, with the runs of its panels; null: those of shared_runs.
    report_id: Mapped[int | None] = mapped_column(ForeignKey("reports.id"))
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float]


class SharedRun(Table):
    """A run that a read-only link shows."""

    __tablename__ = "shared_runs"

    link_id: Mapped[int] = mapped_column(ForeignKey("shared_links.id"), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True, index=True)
    place: Mapped[int]  # position among the runs of the link


class AuditEvent(Table):
    """An audit event: who changed what, when and from where. Rows are never changed or deleted."""

    __tablename__ = "audit_events"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(default=now(), index=True)
    # Null for a command on the server's machine, or a sign-in with an unknown name.
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"), index=True)
    token: Mapped[str | None]  # name of the API token, if one was used
    action: Mapped[str]  # method and path
    # The request's fields that the route lists for the audit log, never a secret.
    detail: Mapped[str] = mapped_column(default="", server_default="")
    # The run concerned, which may have been erased since.
    run_id: Mapped[int | None] = mapped_column(index=True)
    address: Mapped[str]
