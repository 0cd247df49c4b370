"""Tables of runs and sweeps."""

import math
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

from db.clock import now
from db.tables.base import Goal, OfProject, OfRun, Table
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.plain_json import JsonObject


class Status(StrEnum):
    """Status of a run."""

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
#: Source of a run: a recipe or a command on a worker, or a watched training elsewhere.
RECIPE, COMMAND, WATCH = "recipe", "command", "watch"
#: lab.task of a recipe's configuration: a training, or a measurement without steps.
TRAIN, PRECISION_PLAN, PRECISION_DIFF = "train", "precision_plan", "precision_diff"
#: Columns by which lists of runs are filtered and sorted, in addition to settings and metrics.
LISTED = (
    *("name", "recipe", "precision", "tags", "owner_id", "project"),
    *("status", "source", "created_at", "deleted_at", "failure_kind"),
    *("step", "parent_step", "skipped", "loss", "scale", "priority", "steps_per_second"),
    "last_flags",
    *("attempt", "started_at", "ended_at", "stored_bytes"),
)


class Run(OfProject, Table):
    """A training run: its request, its state and its latest values.

    All writes of an attempt name it.

    A watched run has no recipe (empty), no worker and no lease; precision is empty and steps_total
    0 until they are known, and config is what its script reports.

    A command has no recipe either, and the same precision and steps_total. config holds the values
    of its parameters, script_config what its script reports in addition.
    """

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_idempotency_key", "owner_id", "idempotency_key", unique=True),
        Index("ix_runs_watch_id", "owner_id", "watch_id", unique=True),
        # A covering index, so that SQLite reads no long rows for a list; PostgreSQL cannot index
        # long texts.
        Index(*("ix_runs_listed", *LISTED)).ddl_if(dialect="sqlite"),
        Index("ix_runs_ended_at", "ended_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    source: Mapped[str] = mapped_column(default=RECIPE, server_default=RECIPE)
    project: Mapped[str] = mapped_column(default="", server_default="")
    recipe: Mapped[str]
    # {line, folder, git, commit, venv, variables, secrets, parameters}: secrets are names,
    # parameters are JSON Schemas by name.
    command: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    config: Mapped[JsonObject]
    script_config: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    # x axes that the script has defined, by pattern of the metrics' names.
    step_metrics: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    precision: Mapped[str]
    tags: Mapped[str] = mapped_column(default="")
    note: Mapped[str] = mapped_column(default="", server_default="")  # Markdown
    owner_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    parent_step: Mapped[int | None] = mapped_column(BigInteger)
    group_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    after_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))  # waits for its end
    idempotency_key: Mapped[str | None]  # key of the request that submitted it
    request_hash: Mapped[str | None]  # of the request that came with the key
    watch_id: Mapped[str | None]  # a watched run's own identifier

    status: Mapped[Status] = mapped_column(Text, default=Status.QUEUED)
    desired_state: Mapped[str] = mapped_column(default="run")  # run, pause, preempt, cancel or kill
    priority: Mapped[int] = mapped_column(default=0)
    # Whether waiting runs of higher priority may take its devices, see db.queue.preemption.
    preemptible: Mapped[bool] = mapped_column(default=False, server_default=false())
    position: Mapped[float] = mapped_column(default=0.0)  # within a priority, lowest first
    nodes: Mapped[int] = mapped_column(default=1, server_default="1")
    devices_per_node: Mapped[int] = mapped_column(default=1)
    # Training time of similar runs that had finished when it was submitted.
    expected_seconds: Mapped[float | None]
    # Since when it has been the first queued run that waits for several devices.
    first_since: Mapped[float | None]
    # Devices reserved for it, see db.queue.reservations.
    reservation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    attempt: Mapped[int] = mapped_column(default=0)
    # The last step before this attempt's own, null until it has made one.
    resumed_step: Mapped[int | None] = mapped_column(BigInteger)
    worker_id: Mapped[int | None] = mapped_column(ForeignKey("workers.id"))
    stop_reason: Mapped[str | None]
    error: Mapped[str | None]
    failure_kind: Mapped[str | None]  # of its last change of status
    killed_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    # Consecutive attempts that were killed without a new step.
    stalled_attempts: Mapped[int] = mapped_column(default=0, server_default="0")

    created_at: Mapped[float] = mapped_column(default=now())
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    last_report_at: Mapped[float | None]  # last request of a watched run's uploader
    # Rises with every change, so that a viewer can detect that its copy is stale.
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    # The revision at which its checkpoints or artifacts last changed.
    files_revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    step: Mapped[int] = mapped_column(BigInteger, default=0)  # attempted steps
    steps_total: Mapped[int] = mapped_column(BigInteger)
    skipped: Mapped[int] = mapped_column(BigInteger, default=0)  # skipped by the scaler
    # Recorded steps and skips: they never fall, even by a rollback or an erasure; Prometheus
    # counters are their sums.
    recorded_steps: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    recorded_skips: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    loss: Mapped[float | None]
    # Steps in which the loop updated its scaler and stepped no optimizer.
    not_stepped: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # The number of latest steps in a row with all gradients 0.
    zero_steps: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Flags of its last step.
    last_flags: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Time of its last recorded step.
    last_elapsed_ms: Mapped[int | None] = mapped_column(BigInteger)
    # The step from which on no loss was finite, if the last one was not.
    lost_since: Mapped[int | None] = mapped_column(BigInteger)
    scale: Mapped[float | None]
    steps_per_second: Mapped[float | None]
    # Contents of a step, as in the spool's event of that name.
    workload: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Number of rollbacks within attempts, and the last step before the latest one.
    rollbacks: Mapped[int] = mapped_column(default=0, server_default="0")
    rollback_step: Mapped[int | None] = mapped_column(BigInteger)
    # Size of its checkpoints and artifacts in the store.
    stored_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # What cannot be read of it, in words, by the latest check, see db.files.run_damage.
    damage: Mapped[str] = mapped_column(default="", server_default="")
    damage_checked_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    deleted_at: Mapped[float | None]  # in the trash since then
    # The erasure has begun: it can no longer be restored.
    erasing: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Everything but this row is deleted; the row prevents reuse of the id.
    erased_at: Mapped[float | None]

    @property
    def settings(self) -> dict[str, Any]:
        """Configuration of a recipe run; of other runs only the precision."""
        return self.config if self.source == RECIPE else {"precision": self.precision}

    @property
    def task(self) -> str:
        """The task of the run's recipe: train, or a measurement instead."""
        task: str = self.settings.get("lab", {}).get("task", TRAIN)
        return task

    @property
    def whole_config(self) -> dict[str, object]:
        """Configuration with the values that the script reports; submitted parameters win."""
        return self.config | (self.script_config or {}) | self.config

    @property
    def known_loss(self) -> float | None:
        """The last known loss with NaN as NaN, which the column has as NULL; None: unknown."""
        return math.nan if self.loss is None and self.last_flags & NONFINITE_LOSS else self.loss

    @property
    def own_steps(self) -> int:
        """Attempted steps after those of the parent run that it continued."""
        return max(self.step - (self.parent_step or 0), 0)


# In the order of the queue, so that finding its first run needs no sort.
Index("ix_runs_queue", Run.status, Run.priority.desc(), Run.position, Run.id)
#: Condition of a run: deleted and not erased yet.
IN_TRASH = Run.deleted_at.is_not(None) & Run.erased_at.is_(None)
Index("ix_runs_deleted_at", Run.deleted_at, sqlite_where=IN_TRASH, postgresql_where=IN_TRASH)
#: Condition of a run: neither in the trash nor erased, so shown in lists, searches and groups.
NOT_DELETED = Run.deleted_at.is_(None)
# PostgreSQL counts these runs, and finds those of a period, without reading their long rows.
Index("ix_runs_kept", Run.created_at, Run.id, postgresql_where=NOT_DELETED).ddl_if(
    dialect="postgresql"
)


class RunConfigValue(OfRun, Table):
    """One value of a run's configuration, for filters and sort orders of lists."""

    __tablename__ = "run_config_values"
    # The values of a setting of all runs are adjacent: SQLite stores the rows in this order.
    __table_args__ = (
        PrimaryKeyConstraint("name", "path", "run_id", postgresql_include=["number", "text"]),
        {"sqlite_with_rowid": False},
    )

    name: Mapped[str]  # the last part of the path
    path: Mapped[str]
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    number: Mapped[float | None]  # of a numeric value
    text: Mapped[str | None]  # of any other value


class RunStatus(OfRun, Table):
    """A change of a run's status, with time and reason."""

    __tablename__ = "run_statuses"
    __table_args__ = (Index(None, "run_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[int]
    status: Mapped[Status] = mapped_column(Text)
    reason: Mapped[str | None]  # for display
    # infrastructure, code, settings, rule (of the configuration) or sweep (pruned by it).
    failure_kind: Mapped[str | None]
    time: Mapped[float] = mapped_column(default=now())


class RunEnvironment(OfRun, Table):
    """The environment of an attempt."""

    __tablename__ = "run_environments"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    # {worker, host, platform, devices, versions, command, folder, file, git}; file and git may be
    # null.
    content: Mapped[JsonObject]
    source: Mapped[bytes | None]  # the file's text, compressed
    diff: Mapped[bytes | None]  # git's patch, compressed
    requirements: Mapped[bytes | None]  # installed packages, a line each, compressed


class WatchedAttempt(OfRun, Table):
    """One attempt of a watched run, and the progress of its spool upload.

    resumed and early hold events until the first steps arrive, see db.telemetry.recording.
    """

    __tablename__ = "watched_attempts"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str]
    versions: Mapped[dict[str, Any]]
    # Position of the next frame of the training's spool, and of its sidecar's.
    sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    offset: Mapped[int] = mapped_column(BigInteger, default=0)
    sidecar_sequence: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    sidecar_offset: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    resumed: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    early: Mapped[list[dict[str, Any]]]


class ControlRequest(OfRun, Table):
    """A control request to a running training."""

    __tablename__ = "control_requests"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    kind: Mapped[str]  # checkpoint, scale, replay or precision_diff
    value: Mapped[float | None]  # of scale the new scale, of replay the step
    created_at: Mapped[float] = mapped_column(default=now())
    acknowledged_at: Mapped[float | None]


class Sweep(OfProject, Table):
    """A sweep: runs of one recipe or one command that differ in the searched settings.

    Its trials show whether all runs have ended.
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
    recipe: Mapped[str]  # empty for a command
    command: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # as in runs
    config: Mapped[JsonObject]  # common to all runs
    # Values or distribution by path of a setting, see app.sweeps.search_space.
    space: Mapped[JsonObject]
    kind: Mapped[str]  # grid, random, tpe, cmaes or qmc
    # Rule by which weak runs are ended early, see app.sweeps.pruning.
    pruner: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    metric: Mapped[str]  # name of a metric, or loss
    goal: Mapped[str] = mapped_column(Goal)  # minimize or maximize
    seed: Mapped[int] = mapped_column(BigInteger)
    runs_total: Mapped[int]
    at_once: Mapped[int]  # limit of concurrent runs
    submitted: Mapped[int] = mapped_column(default=0)  # runs submitted so far
    tags: Mapped[str]
    priority: Mapped[int]
    preemptible: Mapped[bool] = mapped_column(default=False, server_default=false())
    nodes: Mapped[int] = mapped_column(default=1, server_default="1")
    devices_per_node: Mapped[int]
    status: Mapped[str]  # running, paused, cancelled or failed
    error: Mapped[str | None]  # of a failed sweep
    revision: Mapped[int] = mapped_column(BigInteger, default=0)  # rises with every change
    idempotency_key: Mapped[str | None]
    request_hash: Mapped[str | None]  # of the request that came with the key
    created_at: Mapped[float] = mapped_column(default=now())

    @property
    def is_for_agents(self) -> bool:
        """Whether agents take its points, instead of the queue."""
        return not self.recipe and self.command is None


class Trial(OfRun, Table):
    """One point of a sweep and its run; the primary key prevents a second submission.

    reports, next_rung and pruned_step are used by its pruner.
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
    params: Mapped[JsonObject]  # values by path of the setting
    # Of a sweep for agents: the agent that runs it, and until when it may without a heartbeat.
    agent_id: Mapped[str | None]
    lease_expires_at: Mapped[float | None]
    # open until the run has ended, then complete, pruned, or failed if no value is finite.
    state: Mapped[str]
    value: Mapped[float | None]  # the metric's last value
    # [{rung, value, turn}]: the values that decided its pruning; turn is their order in the sweep.
    reports: Mapped[list[dict[str, Any]]] = mapped_column(default=list, server_default="[]")
    # The next report, in 27ths of its steps, or in values of the metric.
    next_rung: Mapped[int] = mapped_column(default=1, server_default="1")
    # The step at which it was pruned.
    pruned_step: Mapped[int | None] = mapped_column(BigInteger)
