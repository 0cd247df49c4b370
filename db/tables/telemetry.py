"""Tables of telemetry: steps, events, metrics, diagnoses, samples, log lines, files."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from db.database import now
from db.tables.base import OfRun, Table

#: Bits of steps.flags; from bit 8 on, bit 8 + i says that optimizer i skipped.
SKIPPED = 1
NONFINITE_LOSS = 2
NORM_OVERFLOW = 4
NOT_STEPPED = 8  # the loop updated the scaler and made no step: neither applied nor skipped
UNKNOWN_LOSS = 16  # no backward pass of the step was observed: its loss is NULL, and not NaN
IS_NOT_STEPPED = text(f"(flags & {NOT_STEPPED}) <> 0")
#: Conditions on steps, word for word as their indexes have them.
FLAGGED = {
    "skipped": text(f"(flags & {SKIPPED}) <> 0"),
    "nonfinite": text(f"(flags & {NONFINITE_LOSS}) <> 0"),
}
#: Among the devices of samples, the machine itself.
HOST = -1


class Step(OfRun, Table):
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
    step_us: Mapped[int] = mapped_column(BigInteger)
    loss: Mapped[float | None]
    scale: Mapped[float | None]
    grad_norm: Mapped[float | None]
    grad_norm_clipped: Mapped[float | None]
    lr: Mapped[float | None]
    flags: Mapped[int]
    data_us: Mapped[int | None] = mapped_column(BigInteger)


class StepBucket(OfRun, Table):
    """A summary of `size` steps, from step bucket * size on: a stone of the pyramid.

    Sizes are 64, 512, 4096, …; edges are multiples of the size, so they never move. summary is
    packed as db.telemetry.summaries lays it out: as columns it would take twice the bytes.
    """

    __tablename__ = "step_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class ScalerEvent(OfRun, Table):
    """A scaler event after a step: skip, growth, backoff or set. Never sampled.

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


class Metric(OfRun, Table):
    """A number that a recipe names itself: val/accuracy, run/seconds."""

    __tablename__ = "metrics"
    __table_args__ = (UniqueConstraint("run_id", "name", "step"), Index(None, "run_id", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str]
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]
    elapsed_ms: Mapped[int] = mapped_column(BigInteger)


class LatestMetric(OfRun, Table):
    """The latest point of each metric of a run, for lists to be filtered and sorted by."""

    __tablename__ = "latest_metrics"
    __table_args__ = (Index(None, "name", "value", "run_id"), {"sqlite_with_rowid": False})

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None]


class MetricBucket(OfRun, Table):
    """The same for the points of one metric."""

    __tablename__ = "metric_buckets"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    summary: Mapped[bytes]


class Diagnosis(OfRun, Table):
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


class SystemSample(OfRun, Table):
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


class LogLine(OfRun, Table):
    """A line that the training printed; number counts from 1 over all attempts."""

    __tablename__ = "log_lines"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int]
    time: Mapped[float]
    stream: Mapped[str]  # stdout, stderr, or halfstep for our own remarks
    text: Mapped[str]


class StoredFile(OfRun, Table):
    """A file that a run has made.

    key is its path in the store, empty while it is on the training machine alone; path is that in
    the run's folder there. revision is the run's when the row last changed.
    """

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    step: Mapped[int] = mapped_column(BigInteger)
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


class CheckpointFile(StoredFile):
    """A file to download: the whole state ("checkpoint") or the weights alone ("weights").

    A state in shards has a file a rank, "shard.0", and "shard.metadata", which says what lies
    where; its "checkpoint" is what is no shard.
    Of several modules each has its own, of kind "weights.<module>"; averaged weights are of kind
    "ema" or "ema.<module>".

    reason: interval, end, request, cancel, pause or preempt.
    """

    __tablename__ = "checkpoint_files"
    __table_args__ = (UniqueConstraint("run_id", "step", "kind"),)

    attempt: Mapped[int]
    kind: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[float] = mapped_column(default=now())

    @property
    def is_shard(self) -> bool:
        """Whether it is nothing without the other files of its step."""
        return self.kind.startswith("shard.")


class Artifact(StoredFile):
    """A file that a recipe left after an evaluation: a text sample, a picture."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("run_id", "step", "name"),)

    name: Mapped[str]
