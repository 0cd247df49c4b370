"""Rows of the database as JSON, the same for API and live streams."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from app.runs.summary import Number


class _FromRow(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Event(_FromRow):
    """A scaler event after a step: skip, growth, backoff or set."""

    id: int
    step: int
    kind: str
    optimizer: str
    scale_before: Number
    scale_after: Number
    loss_nonfinite: bool
    culprits: list[dict[str, Any]]


class MetricPoint(_FromRow):
    """A point of a metric."""

    name: str
    step: int
    elapsed_ms: int
    value: Number


class LogLine(_FromRow):
    """A line of the training's output."""

    number: int
    attempt: int
    time: float
    stream: str
    text: str


class CheckpointFileRow(_FromRow):
    """A file to download from /runs/{run_id}/checkpoints/{id}/download, if it is_stored."""

    id: int
    attempt: int
    step: int
    kind: str
    reason: str
    size_bytes: int
    sha256: str
    # In the run's folder on the training machine; null for files of earlier versions.
    path: str | None
    is_stored: bool
    created_at: float
