"""Tables of runs and sweeps."""

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    PrimaryKeyConstraint,
    Text,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfProject, OfRun, Table


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
#: What lists of runs are filtered and sorted by, settings and metrics apart.
LISTED = (
    *("name", "recipe", "precision", "tags", "owner_id", "project"),
    *("status", "source", "created_at", "deleted_at", "failure_kind"),
    *("step", "parent_step", "skipped", "loss", "scale", "priority", "steps_per_second"),
    "last_flags",
    *("attempt", "started_at", "ended_at", "stored_bytes"),
)


class Run(OfProject, Table):
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
    them; reservation: what is kept for it, as db.queue.claims has it.
    workload is what a step is made of, as the spool's event of that name has it. rewinds counts how
    often it went back within an attempt, rollback_step is the last step before the latest of these.

    A watched run has no recipe (empty), no worker and no lease; precision is empty and steps_total
    0 until they are known, and config is whatever its script says. watch_id: its own name for
    itself; last_report_at: when its uploader last called.

    not_stepped counts steps in which a loop updated its scaler and stepped no optimizer; last_flags
    are those of the last step; zero_steps counts the last steps, all of whose gradients were 0.

    note is what people wrote of it, in Markdown. stored_bytes: what its checkpoints and artifacts
    take in the store. deleted_at: in the trash since then; erasing: nothing brings it back;
    erased_at: all is gone but this row, which keeps its number from being given again.

    A command has no recipe either, and of precision and steps_total the same is true. config holds
    its parameters' values, script_config what its script says beside these, once it does; command
    is all else of it: {line, folder, git, commit, venv, variables, secrets, parameters}, where
    secrets are names, and parameters are JSON Schemas by name.
    """

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_idempotency_key", "owner_id", "idempotency_key", unique=True),
        Index("ix_runs_watch_id", "owner_id", "watch_id", unique=True),
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
    request_hash: Mapped[str | None]  # of the request that came with the key
    watch_id: Mapped[str | None]

    status: Mapped[Status] = mapped_column(Text, default=Status.QUEUED)
    desired_state: Mapped[str] = mapped_column(default="run")  # run, pause, cancel or kill
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
    failure_kind: Mapped[str | None]
    killed_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    stalled_attempts: Mapped[int] = mapped_column(default=0, server_default="0")

    created_at: Mapped[float] = mapped_column(default=now())
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    last_report_at: Mapped[float | None]
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    files_revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    step: Mapped[int] = mapped_column(BigInteger, default=0)
    steps_total: Mapped[int] = mapped_column(BigInteger)
    skipped: Mapped[int] = mapped_column(BigInteger, default=0)
    recorded_steps: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    recorded_skips: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    loss: Mapped[float | None]
    not_stepped: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    zero_steps: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    last_flags: Mapped[int] = mapped_column(
        BigInteger, default=0, server_default="0"
    )  # of its last step
    scale: Mapped[float | None]
    steps_per_second: Mapped[float | None]
    workload: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    rollbacks: Mapped[int] = mapped_column(default=0, server_default="0")
    rollback_step: Mapped[int | None] = mapped_column(BigInteger)
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


# In the order of the queue, so that nobody sorts it to know its first.
Index("ix_runs_queue", Run.status, Run.priority.desc(), Run.position, Run.id)
#: Of a run, that it is deleted and not erased yet.
IN_TRASH = Run.deleted_at.is_not(None) & Run.erased_at.is_(None)
Index("ix_runs_deleted_at", Run.deleted_at, sqlite_where=IN_TRASH, postgresql_where=IN_TRASH)
#: Of a run, neither in the trash nor erased: all that lists, searches and groups show.
KEPT = Run.deleted_at.is_(None)
# PostgreSQL counts them by it, and finds those of a week, without their long rows.
Index("ix_runs_kept", Run.created_at, Run.id, postgresql_where=KEPT).ddl_if(dialect="postgresql")


class RunConfigValue(OfRun, Table):
    """One setting of a run's configuration, by its path, for lists to be filtered and sorted by.

    name: the last part of the path.  number: of a setting that is one; text: of any other.
    """

    __tablename__ = "run_config_values"
    # A setting of all runs is read in one go on both: SQLite keeps the rows in this order.
    __table_args__ = (
        PrimaryKeyConstraint("name", "path", "run_id", postgresql_include=["number", "text"]),
        {"sqlite_with_rowid": False},
    )

    name: Mapped[str]
    path: Mapped[str]
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    number: Mapped[float | None]
    text: Mapped[str | None]


class RunStatus(OfRun, Table):
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
    failure_kind: Mapped[str | None]
    time: Mapped[float] = mapped_column(default=now())


class RunEnvironment(OfRun, Table):
    """The environment of an attempt.

    content: {worker, host, platform, devices, versions, command, folder, file, git}, of which file
    and git may be null. source, diff: the file's text and what git said had changed, compressed.
    """

    __tablename__ = "run_environments"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[dict[str, Any]]
    source: Mapped[bytes | None]
    diff: Mapped[bytes | None]


class WatchedAttempt(OfRun, Table):
    """One attempt of a watched run, and how far its spool has come in.

    sequence, offset: where the next frame begins.  resumed, early: what it told that waits for its
    first steps, see db.telemetry.recording.
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


class ControlRequest(OfRun, Table):
    """A control request to a running training, and when it was acknowledged.

    kind: checkpoint; scale, with the new scale as value; replay, with the step as value.
    """

    __tablename__ = "control_requests"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    kind: Mapped[str]
    value: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=now())
    acknowledged_at: Mapped[float | None]


class Sweep(OfProject, Table):
    """Runs of one recipe, or of one command, that differ in the settings that are searched.

    command: as a run has it; then there is no recipe.
    config: what all of them have.  space: by path of a setting, its values or its distribution, as
    app.sweeps.search_space has them.  metric: the name of one, or loss; goal: minimise or
    maximise.  runs_total: how many there shall be, of which `submitted` have been; at_once: how
    many may be under way.  status: running, paused, cancelled, or failed, with the error; the
    trials show whether all has ended. revision rises with every change.
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
    command: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
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
    request_hash: Mapped[str | None]  # of the request that came with the key
    created_at: Mapped[float] = mapped_column(default=now())


class Trial(OfRun, Table):
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
