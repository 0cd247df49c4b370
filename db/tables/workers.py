"""Tables of workers, nodes and cluster placements."""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, false, text
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfRun, Table

#: Of a node, that its devices are in use, word for word as its index has it.
IN_USE = text("ended_at IS NULL")


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
    is_sandboxed: whether the sandbox of its runs held when the worker probed it at its start
    walls: of what else its settings ask for, users and limits, "" or why it does not stand there;
    sandbox: why it does not hold, if it was asked for
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
    is_sandboxed: Mapped[bool] = mapped_column(default=False, server_default=false())
    sandbox: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    only_run_id: Mapped[int | None]
    placement: Mapped[str | None]
    drained_at: Mapped[float | None]
    drain_stops: Mapped[bool] = mapped_column(default=False, server_default=false())
    versions: Mapped[dict[str, Any]]
    started_at: Mapped[float] = mapped_column(default=now())
    seen_at: Mapped[float] = mapped_column(default=now())
    stopped_at: Mapped[float | None]


class RunNode(OfRun, Table):
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


class Placement(OfRun, Table):
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
    attempts: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    placed_at: Mapped[float]
    ended_at: Mapped[float | None]
