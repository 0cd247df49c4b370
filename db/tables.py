"""The tables. Column names are the glossary: the same words in JSON, JavaScript and on the page.

Times are seconds since the epoch by the database's clock; `elapsed_ms` counts from the run's first
start by the training machine's clock. A NaN is stored as NULL on both databases (SQLite knows no
NaN); infinities are stored as they are.
"""

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.database import now


class Status(StrEnum):
    """Where a run is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    UNREACHABLE = "unreachable"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


#: An attempt exists and may still write.
ACTIVE = (Status.STARTING, Status.RUNNING, Status.PAUSING, Status.STOPPING, Status.UNREACHABLE)
#: The run is over.
ENDED = (Status.FINISHED, Status.FAILED, Status.CANCELLED)

#: Where a run's training is: a worker's, by a recipe or a command, or elsewhere, and watched.
RECIPE, COMMAND, WATCH = "recipe", "command", "watch"
#: What a token may do: all that its user may, no more than some of it, or send watched runs, or one
#: of them, and nothing else.
FULL, READ, SUBMIT, STEER, WRITE, ONE_RUN = TOKENS = (
    *("full", "read", "submit", "steer", "write", "run"),
)
#: Those that send, and do nothing else.
SENDING = (WRITE, ONE_RUN)

#: Bits of steps.flags; from bit 8 on, bit 8 + i says that optimizer i skipped.
SKIPPED = 1
NONFINITE_LOSS = 2
NORM_OVERFLOW = 4
#: Conditions on steps, word for word as their indexes have them.
FLAGGED = {
    "skipped": text(f"(flags & {SKIPPED}) <> 0"),
    "nonfinite": text(f"(flags & {NONFINITE_LOSS}) <> 0"),
}

#: Of a run, that it is deleted and not erased yet, word for word as its index has it.
IN_BIN = text("deleted_at IS NOT NULL AND erased_at IS NULL")

#: Of a notice, that its condition has held ever since, word for word as its index has it; and of
#: a delivery, that it is still to be made.
IS_OPEN, IS_DUE = text("well_at IS NULL"), text("ended_at IS NULL")
#: Of a node, that its devices are in use, word for word as its index has it.
IN_USE = text("ended_at IS NULL")

#: What lists of runs are filtered and sorted by, settings and metrics apart.
LISTED = (
    *("name", "recipe", "precision", "tags", "owner_id", "project"),
    *("status", "source", "created_at", "deleted_at", "fault"),
    *("step", "parent_step", "skipped", "loss", "scale", "priority", "steps_per_second"),
    *("attempt", "started_at", "ended_at", "stored_bytes"),
)

#: What a column of ids holds; and of counts, so that both databases can still add to it.
LARGEST_ID = 2**31 - 1
LARGEST_COUNT = 2**62


class CleanText(TypeDecorator[str]):
    """Text without what PostgreSQL (a zero byte) or UTF-8 (half a surrogate pair) cannot hold."""

    impl = Text
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        """Say so to whoever exports the column."""
        return str

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Put the replacement character in its place."""
        if value is None:
            return None
        whole = value.encode(errors="replace").decode()
        return whole.replace("\x00", "\N{REPLACEMENT CHARACTER}")


class Table(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: CleanText,
        float: Double,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
        list[int]: JSON,
        list[str]: JSON,
    }


class User(Table):
    """Somebody who may sign in, or might before.

    key: the name as it is compared, so that no two look alike; see db.names.
    subject: what a provider of identities knows them by, its issuer before it.
    is_operator: everything is allowed, users and workers included.  runs_commands: command lines
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
    is_operator: Mapped[bool] = mapped_column(default=False, server_default=false())
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
    """What somebody may do in a project. role: viewer, member or maintainer; see db.rights."""

    __tablename__ = "memberships"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[str]


class SignInLink(Table):
    """A link that signs in once; only the hash of its token is kept."""

    __tablename__ = "sign_in_links"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    expires_at: Mapped[float]


class SignInSession(Table):
    """A signed-in browser; only the hash of its cookie is kept. by_link: not by a password."""

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    csrf_token: Mapped[str]
    by_link: Mapped[bool] = mapped_column(default=False, server_default=false())
    created_at: Mapped[float] = mapped_column(default=now())
    expires_at: Mapped[float]


class Tries(Table):
    """How often somebody was wrong at signing in. kind: address or name, and who of it."""

    __tablename__ = "tries"
    __table_args__ = (Index("ix_tries_tried_at", "tried_at"),)

    kind: Mapped[str] = mapped_column(primary_key=True)
    who: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(default=0)
    tried_at: Mapped[float] = mapped_column(default=now())
    open_at: Mapped[float] = mapped_column(default=0.0)


class Secret(Table):
    """What a command is given in its environment, encrypted; see db.secrets."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    ciphertext: Mapped[str]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    set_at: Mapped[float] = mapped_column(default=now())


class Note(Table):
    """What people wrote of a project or of runs side by side, in Markdown; a run has its own.

    subject: as db.notes has it.  user_id: who changed it last.
    """

    __tablename__ = "notes"

    subject: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    changed_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class Preset(Table):
    """What the form of a new run is filled with, under a name, for who may submit to its project.

    config: those settings that are not the recipe's defaults.  place: what is asked of every run.
    """

    __tablename__ = "presets"
    __table_args__ = (UniqueConstraint("project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str]
    recipe: Mapped[str]
    config: Mapped[dict[str, Any]]
    place: Mapped[dict[str, Any]]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    saved_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class RetentionRule(Table):
    """After how many days what of ended runs is deleted; null days: never.

    project: whose runs; null: of every project that has no rule of its own.
    """

    __tablename__ = "retention_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), unique=True)
    checkpoint_days: Mapped[float | None]
    log_days: Mapped[float | None]
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    set_at: Mapped[float] = mapped_column(default=now(), onupdate=now())


class SavedView(Table):
    """What a person has looked at the list of runs by, under a name: parts of its address."""

    __tablename__ = "saved_views"
    __table_args__ = (UniqueConstraint("user_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    filter: Mapped[str]
    sort: Mapped[str]
    columns: Mapped[str]
    group: Mapped[str] = mapped_column(default="", server_default="")


class ApiToken(Table):
    """A token for scripts; only its hash is kept.

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
    """A read-only link, which shows runs to whoever has it; only the hash of its secret is kept.

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


class Deed(Table):
    """Who changed what, when and from where; rows are neither changed nor deleted.

    user_id: null of who typed it on the server's machine, or tried to sign in as nobody.
    token: the name of the one that a script came with.  deed: method and path.  detail: of what was
    sent what app.deeds lists, never a secret.  run_id: of the run that it was done to, which need
    not be there any more.
    """

    __tablename__ = "deeds"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(default=now(), index=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"), index=True)
    token: Mapped[str | None]
    deed: Mapped[str]
    detail: Mapped[str] = mapped_column(default="", server_default="")
    run_id: Mapped[int | None] = mapped_column(index=True)
    address: Mapped[str]


class Worker(Table):
    """A daemon that runs training on one machine, and what it offers.

    devices: [{kind, index, name, memory_bytes, compute_capability, fp16, bf16, tf32, fp8}]
    recipes: [{name, reference, file or package, title, description, schema, source, sha256,
    check, memory}], where source is the file that it is written in, and memory, as trainer.memory
    counts it with the recipe's defaults, comes later than the rest; of one that cannot load {name,
    reference, error, place}, of one that lacks packages {…, needs}
    recipe_names: of those that can, their paths included; the schemas are long, and whoever asks
    who offers what is asked often.  precisions, device_memory_bytes: what every device has, for
    the same reason
    offers_commands: whether its operator lets people run command lines there
    walls_stand: whether its runs can open nothing that is private, nor look into other processes
    walls: of what else its settings ask for, users and limits, "" or why it does not stand there
    only_run_id: of one that a cluster started, the run that it is for.  placement: of one that
    trains nothing itself, but asks that cluster for workers
    drained_at: since when it is to take nothing more.  drain_stops: nor to go on with what it has
    """

    __tablename__ = "workers"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    host: Mapped[str]
    pid: Mapped[int]
    devices: Mapped[list[dict[str, Any]]]
    recipes: Mapped[list[dict[str, Any]]]
    recipe_names: Mapped[list[str]] = mapped_column(server_default="[]")
    precisions: Mapped[list[str]] = mapped_column(server_default="[]")
    device_memory_bytes: Mapped[float] = mapped_column(default=0.0, server_default="0")
    offers_commands: Mapped[bool] = mapped_column(default=False, server_default=false())
    walls_stand: Mapped[bool] = mapped_column(default=False, server_default=false())
    walls: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    only_run_id: Mapped[int | None]
    placement: Mapped[str | None]
    drained_at: Mapped[float | None]
    drain_stops: Mapped[bool] = mapped_column(default=False, server_default=false())
    versions: Mapped[dict[str, Any]]
    started_at: Mapped[float] = mapped_column(default=now())
    seen_at: Mapped[float] = mapped_column(default=now())
    stopped_at: Mapped[float | None]


class Run(Table):
    """One training run: what was asked for, where it is, and its latest figures.

    step counts attempted steps, skipped those that the scaler skipped. recorded_steps and
    recorded_skips count what came in, and never fall, by a rewind or an erasure: their sums are an
    operator's counters. `revision` rises with every
    change, so that a viewer can tell whether it has seen the row. All writes of an attempt name it.
    fault is that of its last change of status.
    stalled_attempts counts those in a row that were killed without a new step.
    resumed_step is the last step before this attempt's own, NULL until it has made one.
    files_revision is the revision at which its checkpoints or artifacts last changed.
    idempotency_key names the request that submitted it, so that a repeated one does not.
    expected_seconds: how long it trains, by like runs that had finished when it was submitted.
    first_since: of a queued run of several devices, since when it has been the first that waits for
    them; reservation: what is kept for it, as db.claiming has it.
    workload is what a step is made of, as the spool's event of that name has it. rewinds counts how
    often it went back within an attempt, rewound_step is the last step before the latest of these.

    A watched run has no recipe (empty), no worker and no lease; precision is empty and steps_total
    0 until they are known, and config is whatever its script says. watch_id: its own name for
    itself; heard_at: when its uploader last called.

    note is what people wrote of it, in Markdown. stored_bytes: what its checkpoints and artifacts
    take in the store. deleted_at: in the bin since then; erasing: nothing brings it back;
    erased_at: all is gone but this row, which keeps its number from being given again.

    A command has no recipe either, and of precision and steps_total the same is true. config holds
    its parameters' values, script_config what its script says beside these, once it does; command
    is all else of it: {line, folder, git, commit, venv, variables, secrets, parameters}, where
    secrets are names, and parameters are JSON Schemas by name.
    """

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_queue", "status", "priority", "position"),
        Index("ix_runs_idempotency_key", "owner_id", "idempotency_key", unique=True),
        Index("ix_runs_watch_id", "owner_id", "watch_id", unique=True),
        Index(
            *("ix_runs_deleted_at", "deleted_at"),
            sqlite_where=IN_BIN,
            postgresql_where=IN_BIN,
        ),
        # So that SQLite reads none of the long rows for a list; PostgreSQL cannot index long texts.
        Index(*("ix_runs_listed", *LISTED)).ddl_if(dialect="sqlite"),
        Index("ix_runs_ended_at", "ended_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    source: Mapped[str] = mapped_column(default=RECIPE, server_default=RECIPE)
    project: Mapped[str] = mapped_column(default="", server_default="")
    recipe: Mapped[str]
    command: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    config: Mapped[dict[str, Any]]
    script_config: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    precision: Mapped[str]
    tags: Mapped[str] = mapped_column(default="")
    note: Mapped[str] = mapped_column(default="", server_default="")
    owner_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    parent_step: Mapped[int | None] = mapped_column(BigInteger)
    group_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    after_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))  # waits for its end
    idempotency_key: Mapped[str | None]
    watch_id: Mapped[str | None]

    status: Mapped[Status] = mapped_column(Text, default=Status.QUEUED)
    wanted: Mapped[str] = mapped_column(default="run")  # run, pause, cancel or kill
    priority: Mapped[int] = mapped_column(default=0)
    position: Mapped[float] = mapped_column(default=0.0)  # within a priority, lowest first
    nodes: Mapped[int] = mapped_column(default=1, server_default="1")
    devices_per_node: Mapped[int] = mapped_column(default=1)
    expected_seconds: Mapped[float | None]
    first_since: Mapped[float | None]
    reservation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    attempt: Mapped[int] = mapped_column(default=0)
    resumed_step: Mapped[int | None] = mapped_column(BigInteger)
    worker_id: Mapped[int | None] = mapped_column(ForeignKey("workers.id"))
    stop_reason: Mapped[str | None]
    error: Mapped[str | None]
    fault: Mapped[str | None]
    killed_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    stalled_attempts: Mapped[int] = mapped_column(default=0, server_default="0")

    created_at: Mapped[float] = mapped_column(default=now())
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    heard_at: Mapped[float | None]
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    files_revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    step: Mapped[int] = mapped_column(BigInteger, default=0)
    steps_total: Mapped[int] = mapped_column(BigInteger)
    skipped: Mapped[int] = mapped_column(BigInteger, default=0)
    recorded_steps: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    recorded_skips: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    loss: Mapped[float | None]
    scale: Mapped[float | None]
    steps_per_second: Mapped[float | None]
    workload: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    rewinds: Mapped[int] = mapped_column(default=0, server_default="0")
    rewound_step: Mapped[int | None] = mapped_column(BigInteger)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    deleted_at: Mapped[float | None]
    erasing: Mapped[bool] = mapped_column(default=False, server_default=false())
    erased_at: Mapped[float | None]

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, where a recipe says what it means; else the precision alone."""
        return self.config if self.source == RECIPE else {"precision": self.precision}

    @property
    def whole_config(self) -> dict[str, Any]:
        """Its configuration with what its script says of it; a parameter is what was submitted."""
        return self.config | (self.script_config or {}) | self.config

    @property
    def own_steps(self) -> int:
        """Attempted steps after those of the parent whose checkpoint it started from."""
        return max(self.step - (self.parent_step or 0), 0)


class RunSetting(Table):
    """One setting of a run's configuration, by its path, for lists to be filtered and sorted by.

    name: the last part of the path.  number: of a setting that is one; text: of any other.
    """

    __tablename__ = "run_settings"
    __table_args__ = ({"sqlite_with_rowid": False},)

    name: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True, index=True)
    number: Mapped[float | None]
    text: Mapped[str | None]


class Sweep(Table):
    """Runs of one recipe that differ in the settings that are searched.

    config: what all of them have.  space: by path of a setting, its values or its distribution, as
    app.search has them.  metric: the name of one, or loss; goal: minimise or maximise.  runs_total:
    how many there shall be, of which `submitted` have been; at_once: how many may be under way.
    status: running, paused, cancelled, or failed, with the error; that all has ended is the
    trials' to tell. revision rises with every change.
    """

    __tablename__ = "sweeps"
    __table_args__ = (
        Index("ix_sweeps_idempotency_key", "owner_id", "idempotency_key", unique=True),
        Index("ix_sweeps_status", "status"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    owner_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    project: Mapped[str] = mapped_column(default="", server_default="")
    recipe: Mapped[str]
    config: Mapped[dict[str, Any]]
    space: Mapped[dict[str, Any]]
    kind: Mapped[str]  # grid, random, tpe or hyperband
    metric: Mapped[str]
    goal: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    runs_total: Mapped[int]
    at_once: Mapped[int]
    submitted: Mapped[int] = mapped_column(default=0)
    tags: Mapped[str]
    priority: Mapped[int]
    nodes: Mapped[int] = mapped_column(default=1, server_default="1")
    devices_per_node: Mapped[int]
    status: Mapped[str]
    error: Mapped[str | None]
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    idempotency_key: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(default=now())


class Trial(Table):
    """One point of a sweep and the run that tries it: the key lets no point be submitted twice.

    params: by path of a setting, the value tried.  state: open until the run has ended; then
    complete, with the metric's last value, pruned, with the last one that it came to, or failed,
    where there is none that is finite.
    Of Hyperband, reports: [{rung, value, turn}], what it was judged by, turn being their order in
    the sweep; next_rung: in 27ths of its steps, when it reports next.  pruned_step: where it was
    when the sweep gave it up.
    """

    __tablename__ = "trials"
    __table_args__ = (
        Index("ix_trials_state", "state"),
        Index("ix_trials_run_id", "run_id", unique=True),
        {"sqlite_with_rowid": False},
    )

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweeps.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    params: Mapped[dict[str, Any]]
    state: Mapped[str]
    value: Mapped[float | None]
    reports: Mapped[list[dict[str, Any]]] = mapped_column(default=list, server_default="[]")
    next_rung: Mapped[int] = mapped_column(default=1, server_default="1")
    pruned_step: Mapped[int | None] = mapped_column(BigInteger)


class RunNode(Table):
    """One machine's part in one attempt, and its lease; a watched run has neither worker nor lease.

    Node 0 records what the training tells, and closes the attempt when the others have ended.
    step_before: how far the run was then. resumed_step: as in runs, and kept.  host, port: of node
    0 of several, where their ranks meet.  ending: of a node of several, how its part ended:
    {reason, error, fault}, where fault is null if it ended as it should.
    """

    __tablename__ = "run_nodes"
    __table_args__ = (
        Index(*("ix_run_nodes_open", "worker_id"), sqlite_where=IN_USE, postgresql_where=IN_USE),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[int] = mapped_column(primary_key=True)
    worker_id: Mapped[int | None] = mapped_column(ForeignKey("workers.id"))
    devices: Mapped[list[int]]
    step_before: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    resumed_step: Mapped[int | None] = mapped_column(BigInteger)
    host: Mapped[str | None]
    port: Mapped[int | None]
    lease_expires_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    ending: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class Placement(Table):
    """What a cluster was asked for, for one attempt of a run: so many workers with so many devices.

    tries: how often, in a row.  state: waiting, running or gone, and reason: why, as the cluster
    says. That it is gone says nothing of the run: leases do.
    """

    __tablename__ = "placements"
    __table_args__ = (
        Index(*("ix_placements_open", "run_id"), sqlite_where=IN_USE, postgresql_where=IN_USE),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    nodes: Mapped[int]
    devices: Mapped[int]
    tries: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    placed_at: Mapped[float]
    ended_at: Mapped[float | None]


class WatchedAttempt(Table):
    """One attempt of a watched run, and how far its spool has come in.

    sequence, offset: where the next frame begins.  resumed, early: what it told that waits for its
    first steps, see db.recording.
    """

    __tablename__ = "watched_attempts"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str]
    versions: Mapped[dict[str, Any]]
    sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    offset: Mapped[int] = mapped_column(BigInteger, default=0)
    resumed: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    early: Mapped[list[dict[str, Any]]]


class RunEnvironment(Table):
    """What an attempt was started in.

    content: {worker, host, platform, devices, versions, command, folder, file, git}, of which file
    and git may be null. source, diff: the file's text and what git said had changed, compressed.
    """

    __tablename__ = "run_environments"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[dict[str, Any]]
    source: Mapped[bytes | None]
    diff: Mapped[bytes | None]


class RunStatus(Table):
    """A change of status, when and why.

    reason is for people; fault is infrastructure, code, rule: one of the configuration's, or sweep:
    the one that gave it up.
    """

    __tablename__ = "run_statuses"
    __table_args__ = (Index(None, "run_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[int]
    status: Mapped[Status] = mapped_column(Text)
    reason: Mapped[str | None]
    fault: Mapped[str | None]
    time: Mapped[float] = mapped_column(default=now())


class Step(Table):
    """One attempted step.

    scale is the one used for this step; the norms are L2 over all parameters, unscaled, before and
    after the clip (grad_norm_clipped is NULL where the clip changed nothing). elapsed_ms and
    step_us are whole numbers, not seconds, because SQLite stores those in 2 to 4 bytes, not 8.
    data_us is what of step_us the loop waited for data, NULL where that is not known.
    The indexes hold only the few steps that have a flag, so that each is found in the longest run.
    run_id has no foreign key, which PostgreSQL would check row by row, at half the speed: whoever
    writes steps holds the run's row.
    """

    __tablename__ = "steps"
    __table_args__ = (
        *(
            Index(
                *(f"ix_steps_{name}", "run_id", "step", "flags"),
                sqlite_where=condition,
                postgresql_where=condition,
            )
            for name, condition in FLAGGED.items()
        ),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    elapsed_ms: Mapped[int] = mapped_column(BigInteger)
    step_us: Mapped[int] = mapped_column(BigInteger)
    loss: Mapped[float | None]
    scale: Mapped[float | None]
    grad_norm: Mapped[float | None]
    grad_norm_clipped: Mapped[float | None]
    lr: Mapped[float | None]
    flags: Mapped[int]
    data_us: Mapped[int | None] = mapped_column(BigInteger)


class StepBucket(Table):
    """A summary of `size` steps, from step bucket * size on: a stone of the pyramid.

    Sizes are 64, 512, 4096, …; edges are multiples of the size, so they never move. summary is
    packed as db.summaries lays it out: as columns it would take twice the bytes.
    """

    __tablename__ = "step_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class MetricBucket(Table):
    """The same for the points of one metric."""

    __tablename__ = "metric_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class ScalerEvent(Table):
    """What the scaler did after a step: skip, growth, backoff or set. Never sampled.

    One skip row for each optimizer that skipped. culprits: [{name}] in forward order, the
    parameters whose gradients were not finite.
    """

    __tablename__ = "scaler_events"
    __table_args__ = (
        UniqueConstraint("run_id", "step", "kind", "optimizer"),
        Index(None, "run_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    step: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    optimizer: Mapped[str] = mapped_column(default="")  # empty where it concerns all of them
    scale_before: Mapped[float]
    scale_after: Mapped[float]
    loss_nonfinite: Mapped[bool] = mapped_column(default=False)
    culprits: Mapped[list[dict[str, Any]]]


class Metric(Table):
    """A number that a recipe names itself: val/accuracy, run/seconds."""

    __tablename__ = "metrics"
    __table_args__ = (UniqueConstraint("run_id", "name", "step"), Index(None, "run_id", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str]
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]
    elapsed_ms: Mapped[int] = mapped_column(BigInteger)


class LatestMetric(Table):
    """The latest point of each metric of a run, for lists to be filtered and sorted by."""

    __tablename__ = "latest_metrics"
    __table_args__ = (Index(None, "name", "value", "run_id"), {"sqlite_with_rowid": False})

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]


class Checkpoint(Table):
    """A file to download: the whole state ("checkpoint") or the weights alone ("weights").

    A state in shards has a file a rank, "shard.0", and "shard.metadata", which says what lies
    where; its "checkpoint" is what is no shard.
    Of several modules each has its own, of kind "weights.<module>"; averaged weights are of kind
    "ema" or "ema.<module>".

    key is its path in the store, empty while it is on the training machine alone; path is that in
    the run's folder there. reason: interval, end, request, cancel, pause or preempt.
    revision is the run's when the row last changed.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "step", "kind"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    key: Mapped[str]
    path: Mapped[str | None]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    reason: Mapped[str]
    revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    created_at: Mapped[float] = mapped_column(default=now())

    @property
    def is_stored(self) -> bool:
        """Whether it can be downloaded."""
        return self.key != ""

    @property
    def stored_bytes(self) -> int:
        """What it takes in the store."""
        return self.size_bytes if self.key else 0

    @property
    def is_shard(self) -> bool:
        """Whether it is nothing without the other files of its step."""
        return self.kind.startswith("shard.")


class Artifact(Table):
    """A file that a recipe left after an evaluation: a text sample, a picture.

    key, path: as a checkpoint's. revision is the run's when the row last changed.
    """

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("run_id", "step", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    step: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str]
    key: Mapped[str]
    path: Mapped[str | None]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    @property
    def is_stored(self) -> bool:
        """Whether it can be downloaded."""
        return self.key != ""

    @property
    def stored_bytes(self) -> int:
        """What it takes in the store."""
        return self.size_bytes if self.key else 0


class Diagnosis(Table):
    """What was found out: of a step a histogram, headroom, updates, replay, retry or poison;
    shapes and weights at 0; a failure; of a checkpoint how long its save took.

    content is the event of that kind as the spool's module describes it.
    """

    __tablename__ = "diagnoses"
    __table_args__ = (UniqueConstraint("run_id", "kind", "step"), Index(None, "run_id", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[str]
    step: Mapped[int] = mapped_column(BigInteger)
    content: Mapped[dict[str, Any]]


class Request(Table):
    """Something a person asked of a running run, and when the training told that it had obeyed.

    kind: checkpoint; scale, with the new scale as value; replay, with the step as value.
    """

    __tablename__ = "requests"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    kind: Mapped[str]
    value: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=now())
    obeyed_at: Mapped[float | None]


class LogLine(Table):
    """A line that the training printed; number counts from 1 over all attempts."""

    __tablename__ = "log_lines"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int]
    time: Mapped[float]
    stream: Mapped[str]  # stdout, stderr, or halfstep for our own remarks
    text: Mapped[str]


#: Among the devices of samples, the machine itself.
HOST = -1


class SystemSample(Table):
    """How busy one device of a run was, every two seconds; one of them is the HOST."""

    __tablename__ = "system_samples"
    __table_args__ = (
        ForeignKeyConstraint(["run_id"], ["runs.id"]),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(primary_key=True)
    device: Mapped[int] = mapped_column(primary_key=True)
    elapsed_ms: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    utilization: Mapped[float | None]  # 0 to 1
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    power_watts: Mapped[float | None]
    temperature_celsius: Mapped[float | None]


class AlertRule(Table):
    """Of what somebody wants to be told: a condition, of which runs, and by which channels.

    scope: run, project, mine or all.  value: of conditions that have one; metric: likewise.
    """

    __tablename__ = "alert_rules"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    condition: Mapped[str]
    value: Mapped[float | None]
    metric: Mapped[str] = mapped_column(default="")
    scope: Mapped[str]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    project: Mapped[str] = mapped_column(default="")
    channel_ids: Mapped[list[int]]
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class AlertLook(Table):
    """The one row that servers agree by: turn rises with every look that wrote something."""

    __tablename__ = "alert_looks"

    id: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger)
    looked_at: Mapped[float]


class Notice(Table):
    """That a rule's condition came to hold for a run; well_at: when it was so no longer.

    While it holds there is one notice of a rule and a run, which its index decides. content is what
    channels are told, as docs/alerts.md describes it. rule_id is NULL once the rule is deleted.
    """

    __tablename__ = "notices"
    __table_args__ = (
        Index(
            *("ix_notices_open", "rule_id", "run_id"),
            unique=True,
            sqlite_where=IS_OPEN,
            postgresql_where=IS_OPEN,
        ),
        Index("ix_notices_user_id", "user_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    rule_id: Mapped[int | None] = mapped_column(ForeignKey("alert_rules.id"))
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    condition: Mapped[str]
    text: Mapped[str]
    content: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=now())
    well_at: Mapped[float | None]
    read_at: Mapped[float | None]


class Channel(Table):
    """How somebody is told: kind is webhook, slack or email.

    target is what pages show of it: an address of e-mail, or of a URL no more than the host.
    ciphertext: what it takes to reach it, see db.channels.
    """

    __tablename__ = "channels"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    name: Mapped[str]
    kind: Mapped[str]
    target: Mapped[str]
    ciphertext: Mapped[str]
    is_on: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=now())


class Delivery(Table):
    """A notice on its way through a channel, or a test, which has no notice and no run.

    body is what is sent.  due_at: when it is tried next; a server that tries it puts that off, so
    that no other does.  answer: to the last attempt.  ended_at: since when it is tried no more.
    """

    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "due_at", sqlite_where=IS_DUE, postgresql_where=IS_DUE),
        Index("ix_deliveries_user_id", "user_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    channel_id: Mapped[int] = mapped_column(ForeignKey("channels.id"), index=True)
    notice_id: Mapped[int | None] = mapped_column(ForeignKey("notices.id"), index=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    body: Mapped[str]
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[float] = mapped_column(default=now())
    created_at: Mapped[float] = mapped_column(default=now())
    tried_at: Mapped[float | None]
    answer: Mapped[str] = mapped_column(default="")
    ended_at: Mapped[float | None]
    is_delivered: Mapped[bool] = mapped_column(default=False)
