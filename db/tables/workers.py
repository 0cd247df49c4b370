"""Tables of workers, nodes and cluster placements."""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, false, text
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfRun, Table

#: Condition of a node with devices in use, with the exact text of its index.
IN_USE = text("ended_at IS NULL")


class Worker(Table):
    """A worker daemon on one machine, and its capabilities."""

    __tablename__ = "workers"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    host: Mapped[str]
    pid: Mapped[int]
    # [{kind, index, name, memory_bytes, compute_capability, fp16, bf16, tf32, fp8}]
    devices: Mapped[list[dict[str, Any]]]
    # [{name, reference, file or package, title, description, schema, source, sha256, check,
    # memory}]: source is its source file; memory, the estimate of trainer.memory for the recipe's
    # defaults, is added later. A recipe that cannot load has {name, reference, error, place}, one
    # that lacks packages {…, needs}.
    recipes: Mapped[list[dict[str, Any]]]
    # Names and paths of the recipes that can load: a copy, since the schemas are long and these
    # names are read often.
    recipe_names: Mapped[list[str]] = mapped_column(server_default="[]")
    # Precisions and memory that all devices have: copies for the same reason.
    precisions: Mapped[list[str]] = mapped_column(server_default="[]")
    device_memory_bytes: Mapped[float] = mapped_column(default=0.0, server_default="0")
    # Whether it runs command lines, by its configuration.
    offers_commands: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Whether the sandbox passed the worker's check at its start.
    is_sandboxed: Mapped[bool] = mapped_column(default=False, server_default=false())
    # State of the requested isolation (users, limits): "" or why it is not active; under "sandbox"
    # why a requested sandbox is not active.
    sandbox: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    # The run that a cluster started it for.
    only_run_id: Mapped[int | None]
    # The cluster that it requests workers from; it trains nothing itself.
    placement: Mapped[str | None]
    # Since then it claims no runs.
    drained_at: Mapped[float | None]
    # The drain also stops its runs.
    drain_stops: Mapped[bool] = mapped_column(default=False, server_default=false())
    versions: Mapped[dict[str, Any]]
    # Memory of the process that its trainings are forked from.
    warm_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    started_at: Mapped[float] = mapped_column(default=now())
    seen_at: Mapped[float] = mapped_column(default=now())
    stopped_at: Mapped[float | None]


class RunNode(OfRun, Table):
    """A node of an attempt, and its lease; a watched run has neither worker nor lease.

    Node 0 records the training's events, and closes the attempt when the others have ended.
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
    # The run's step when the attempt was claimed.
    step_before: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # As in runs, but never cleared.
    resumed_step: Mapped[int | None] = mapped_column(BigInteger)
    # Address of the rendezvous, only of node 0 of several.
    host: Mapped[str | None]
    port: Mapped[int | None]
    lease_expires_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    # Outcome of a node of several: {reason, error, failure_kind}; failure_kind is null without a
    # failure.
    ending: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class Placement(OfRun, Table):
    """A request to a cluster for the workers of one attempt.

    State gone does not mean that the run has ended: leases decide that.
    """

    __tablename__ = "placements"
    __table_args__ = (
        Index(*("ix_placements_open", "run_id"), sqlite_where=IN_USE, postgresql_where=IN_USE),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    nodes: Mapped[int]
    devices: Mapped[int]  # per node
    attempts: Mapped[int]  # consecutive requests
    state: Mapped[str]  # waiting, running or gone
    reason: Mapped[str]  # reported by the cluster
    placed_at: Mapped[float]
    ended_at: Mapped[float | None]
