"""Rows of the database as JSON, the same for API and live streams."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, computed_field

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


class StoredFile(_FromRow):
    """A file of a run."""

    KIND: ClassVar[str]  # part of the path of its download

    id: int
    run_id: Annotated[int, Field(exclude=True)]
    step: int
    size_bytes: int
    sha256: str
    # In the run's folder on the training machine; null for files of earlier versions.
    path: str | None
    is_stored: bool

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def download_url(self) -> str | None:
        """Path on this server to download it from; null: only on the training machine."""
        is_here = self.is_stored
        return f"/api/v1/runs/{self.run_id}/{self.KIND}/{self.id}/download" if is_here else None


class CheckpointFileRow(StoredFile):
    """A file of a checkpoint."""

    KIND = "checkpoints"

    attempt: int
    kind: str
    reason: str
    created_at: float


class ArtifactFile(StoredFile):
    """A file that a run has logged."""

    KIND = "artifacts"

    name: str
