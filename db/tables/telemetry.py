"""Tables of telemetry: steps, events, metrics, diagnoses, samples, log lines, files."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfRun, Table
from halfstep.telemetry.flags import NONFINITE_LOSS, NOT_STEPPED, SKIPPED
from halfstep.telemetry.plain_json import JsonObject

IS_NOT_STEPPED = text(f"(flags & {NOT_STEPPED}) <> 0")
#: Conditions on steps, with the exact text of their indexes.
FLAGGED = {
    "skipped": text(f"(flags & {SKIPPED}) <> 0"),
    "nonfinite": text(f"(flags & {NONFINITE_LOSS}) <> 0"),
}
#: Condition on blocks of steps, with the exact text of their index.
IN_TAIL = text("NOT is_sealed")
#: Device number of samples of the machine itself.
HOST = -1


class Step(OfRun, Table):
    """A step that was skipped or not stepped, or whose loss is not finite.

    A copy of what `step_blocks` has, for queries of such steps in SQL. The partial indexes are fast
    whatever a run has. Rows of all steps are of an earlier version: their run is in
    `step_conversions`.
    run_id has no foreign key, which PostgreSQL would check row by row, at half the speed; writers
    of steps hold a lock on the run's row.
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
        Index(
            "ix_steps_not_stepped",
            "run_id",
            "step",
            sqlite_where=IS_NOT_STEPPED,
            postgresql_where=IS_NOT_STEPPED,
        ),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    elapsed_ms: Mapped[int] = mapped_column(BigInteger)
    step_us: Mapped[int] = mapped_column(BigInteger)  # duration of the step
    loss: Mapped[float | None]
    scale: Mapped[float | None]  # the loss scale used for this step
    grad_norm: Mapped[float | None]  # L2 over all parameters, unscaled, before the clip
    grad_norm_clipped: Mapped[float | None]  # after the clip, null if it changed nothing
    lr: Mapped[float | None]
    flags: Mapped[int]  # bits of halfstep.telemetry.flags; 8 + i: optimizer i was skipped
    # The part of step_us spent waiting for data, null if unknown.
    data_us: Mapped[int | None] = mapped_column(BigInteger)


class StepBlock(OfRun, Table):
    """Consecutive steps of a run; `db.telemetry.block_codec` has the format of its bytes.

    The blocks of a run do not overlap. A sealed one has all steps of one or several ranges of 4,096
    step numbers; the others, the tail of the run, are the steps of its latest flushes.
    """

    __tablename__ = "step_blocks"
    __table_args__ = (
        Index(
            "ix_step_blocks_tail", "run_id", "first", sqlite_where=IN_TAIL, postgresql_where=IN_TAIL
        ),
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    first: Mapped[int] = mapped_column(BigInteger, primary_key=True)  # its first step
    last: Mapped[int] = mapped_column(BigInteger)  # its last step
    steps: Mapped[int]  # number of steps
    is_sealed: Mapped[bool]
    lows: Mapped[bytes | None]  # summaries of 64 steps, if it is sealed
    data: Mapped[bytes]


class LossCurve(OfRun, Table):
    """The loss of the first step in each range of `stride` steps, for lists of runs."""

    __tablename__ = "loss_curves"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    stride: Mapped[int] = mapped_column(BigInteger)  # a power of two
    points: Mapped[bytes]  # see db.telemetry.loss_curves


class StepConversion(OfRun, Table):
    """A run whose steps or metrics an earlier version recorded, until they are in blocks.

    Its steps are rows of `steps`, or in the file that `frozen_steps` names, or in both; its metrics
    are rows of `metrics`.
    """

    __tablename__ = "step_conversions"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    # An attempt that was active at the upgrade: a process of the earlier version records it.
    attempt: Mapped[int | None]
    # Number of its steps, once the conversion has begun.
    steps: Mapped[int | None] = mapped_column(BigInteger)
    # Its blocks have been read back and compared: they are read, and the rows may be deleted.
    is_verified: Mapped[bool] = mapped_column(default=False)
    # Its metrics are not in blocks yet, or these have not been compared.
    metrics_wait: Mapped[bool] = mapped_column(default=False, server_default=false())


class StepBucket(OfRun, Table):
    """A summary of `size` steps, from step bucket * size on: one level of the pyramid.

    Sizes are 512, 4096, …; edges are multiples of the size, so they never move. Only sealed blocks
    are summarized here. summary is packed by db.telemetry.summaries: as columns it would take twice
    the bytes.
    """

    __tablename__ = "step_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class ScalerEvent(OfRun, Table):
    """A scaler event after a step: skip, growth, backoff or set. Never sampled.

    One skip row for each optimizer that skipped.
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
    optimizer: Mapped[str] = mapped_column(default="")  # empty: all optimizers
    scale_before: Mapped[float]
    scale_after: Mapped[float]
    loss_nonfinite: Mapped[bool] = mapped_column(default=False)
    # [{name}]: parameters with non-finite gradients, in forward order.
    culprits: Mapped[list[dict[str, Any]]]


class MetricBlock(OfRun, Table):
    """Points of one metric of a run, in order of step; see `db.telemetry.metric_blocks`."""

    __tablename__ = "metric_blocks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    # No point of an earlier block is at or after this step, and no point of this one is before it.
    first: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    last: Mapped[int] = mapped_column(BigInteger)  # step of its last point
    points: Mapped[int]  # number of points
    low: Mapped[float | None]  # extremes of the finite values
    high: Mapped[float | None]
    size: Mapped[int]  # of the buckets that `lows` summarizes, or 0
    lows: Mapped[bytes]  # empty in the last block of a metric
    data: Mapped[bytes]


class MetricTail(OfRun, Table):
    """The points of a flush, or of several joined ones, that are in no block of a metric yet."""

    __tablename__ = "metric_tails"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    # The revision of the run that its latest flush has made: it numbers the flushes.
    revision: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    # Of the flush before its first one; 0 if there was none.
    previous: Mapped[int] = mapped_column(BigInteger)
    points: Mapped[int]  # number of points, of which later flushes may replace some
    data: Mapped[bytes]  # see db.telemetry.metric_points


class Metric(OfRun, Table):
    """A point of a metric, as earlier versions recorded it: its run is in `step_conversions`."""

    __tablename__ = "metrics"
    __table_args__ = (UniqueConstraint("run_id", "name", "step"), Index(None, "run_id", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str]
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]
    elapsed_ms: Mapped[int] = mapped_column(BigInteger)


class LatestMetric(OfRun, Table):
    """The latest point of each metric of a run, for filters and sort orders of lists."""

    __tablename__ = "latest_metrics"
    __table_args__ = (Index(None, "name", "value", "run_id"), {"sqlite_with_rowid": False})

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]


class MetricBucket(OfRun, Table):
    """A summary of points of one metric, as earlier versions recorded it."""

    __tablename__ = "metric_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class Diagnosis(OfRun, Table):
    """A diagnosis of a step, or of the whole run at step 0.

    Kinds of a step: histogram, headroom, updates, replay, retry, poison, precision_diff, and
    checkpoint, with the duration of the save. Kinds at step 0: shapes, weights and precision_plan.
    content is the spool's event of that kind.
    """

    __tablename__ = "diagnoses"
    __table_args__ = (UniqueConstraint("run_id", "kind", "step"), Index(None, "run_id", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[str]
    step: Mapped[int] = mapped_column(BigInteger)
    content: Mapped[JsonObject]


class SystemSample(OfRun, Table):
    """Utilization of one device of a run, every two seconds; device HOST is the machine."""

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
    # Of HOST: memory of a watched script with its child processes, and the machine's traffic.
    process_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    disk_bytes_per_second: Mapped[float | None]
    network_bytes_per_second: Mapped[float | None]


class LogLine(OfRun, Table):
    """A line of the training's output."""

    __tablename__ = "log_lines"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    # Counts from 1 over all attempts.
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int]
    time: Mapped[float]
    stream: Mapped[str]  # stdout, stderr, or halfstep for lines of our own
    text: Mapped[str]


class StoredFile(OfRun, Table):
    """A file of a run."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    step: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str]  # in the store, empty while the file exists only on the training machine
    path: Mapped[str | None]  # in the run's folder on the training machine
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    # The run's revision when the row last changed.
    revision: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    @property
    def is_stored(self) -> bool:
        """Whether it can be downloaded."""
        return self.key != ""

    @property
    def stored_bytes(self) -> int:
        """Bytes that it uses in the store."""
        return self.size_bytes if self.key else 0


class CheckpointFile(StoredFile):
    """A file of a checkpoint: the full state ("checkpoint") or only the weights ("weights").

    A sharded state has one file per rank, "shard.0" and so on, and an index, "shard.metadata"; its
    "checkpoint" contains everything else. With several modules each has its own weights, of kind
    "weights.<module>"; averaged weights are of kind "ema" or "ema.<module>".
    """

    __tablename__ = "checkpoint_files"
    __table_args__ = (UniqueConstraint("run_id", "step", "kind"),)

    attempt: Mapped[int]
    kind: Mapped[str]
    reason: Mapped[str]  # interval, end, request, cancel, pause or preempt
    created_at: Mapped[float] = mapped_column(default=now())

    @property
    def is_shard(self) -> bool:
        """Whether it is unusable without the other files of its step."""
        return self.kind.startswith("shard.")


class Artifact(StoredFile):
    """A file that a recipe saved at an evaluation, such as a text sample or a picture."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("run_id", "step", "name"),)

    name: Mapped[str]


class FrozenSteps(StoredFile):
    """The Parquet file of an earlier version with steps of a run that is in `step_conversions`.

    A row of `steps` takes precedence over the file. step is the last step of the file that counts.
    """

    __tablename__ = "frozen_steps"
    __table_args__ = (UniqueConstraint("run_id"),)

    footer_sha256: Mapped[str]  # checked when the file is opened; its pages have checksums
    attempt: Mapped[int]
    previous_key: Mapped[str | None]  # of an earlier file, which may not be deleted yet
    is_settled: Mapped[bool] = mapped_column(default=False)
