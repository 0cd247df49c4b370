"""Summaries of runs, shared by pages, API and live streams."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer
from sqlalchemy.orm import Session

from app.http.parameters import DocumentedModel
from db.health import input_bound, scaling_health
from db.queue import pending_reasons, workers
from db.queue.pending_reasons import Queue
from db.runs import run_metadata, runs
from db.runs.outcomes import RunOutcome, run_outcome
from db.settings import Settings
from db.tables import ACTIVE, COMMAND, ENDED, RECIPE, Run, Status
from halfstep.number_formats import UNKNOWN, count, number
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.plain_json import json_safe
from halfstep.telemetry.scaling_health import ScalingHealth

TIMED_AFTER = 10  # steps, before which the time left is unknown
#: A number; null is unknown, and what JSON lacks is "NaN", "Infinity" or "-Infinity".
Number = Annotated[float | None, PlainSerializer(json_safe, return_type=float | str | None)]


class RunHealth(DocumentedModel):
    """Loss-scale health: calibrating, healthy, oscillating, collapsing or dead."""

    word: str
    reason: str
    figures: dict[str, Any]
    """Numbers from which it is computed; see db/health/scaling_health.py"""


class DataWait(BaseModel):
    """Time that the latest steps waited for data."""

    steps: Annotated[int, Field(description="Latest steps with a known wait, at most 100")]
    waited: Annotated[int, Field(description="Steps that waited for a fifth of their time or more")]
    share: Annotated[float, Field(description="Share of the time of all these steps")]
    is_real: Annotated[bool, Field(description="Whether the wait is long enough to act on")]
    per_cent: Annotated[int, Field(description="Share of the steps that waited")]


class NamedRun(BaseModel):
    """A run that a queued run waits for."""

    id: int
    label: Annotated[str, Field(description="Its name in the reason")]


class RunSummary(BaseModel):
    """Summary of a run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: int
    name: str
    source: Annotated[str, Field(description="recipe, command or watch (trained elsewhere)")]
    project: str
    recipe: Annotated[str, Field(description="Empty if the run has none")]
    precision: Annotated[str, Field(description="Empty while unknown")]
    status: Status
    attempt: int
    owner: str
    tags: list[str]
    priority: int
    preemptible: bool
    """Whether a waiting run of higher priority may take its devices"""
    nodes: int
    devices_per_node: Annotated[int, Field(description="Devices on each node")]
    after_id: Annotated[int | None, Field(description="Run whose end this one waits for")]
    parent_id: Annotated[int | None, Field(description="Run from whose checkpoint it started")]
    parent_step: int | None
    group_id: Annotated[int | None, Field(description="Comparison that it belongs to")]
    step: Annotated[int, Field(description="Attempted steps")]
    own_steps: Annotated[int, Field(description="Steps after its parent's checkpoint")]
    steps_total: Annotated[int, Field(description="0 if unknown")]
    applied: Annotated[int, Field(description="Own steps not skipped, or retried in fp32")]
    skipped: int
    loss: Annotated[Number, Field(description="Last known value; null: unknown")]
    is_loss_nonfinite: bool
    """Whether the last loss is NaN or infinite"""
    scale: Number
    health: Annotated[RunHealth | None, Field(description="Null without a loss scale")]
    is_scaled: Annotated[bool, Field(description="Whether it has a loss scale")]
    steps_per_second: Number
    """Over the latest steps; after the end, over all steps"""
    examples_per_second: Annotated[Number, Field(description="Null if unknown")]
    tokens_per_second: Annotated[Number, Field(description="Null if the recipe has no tokens")]
    utilisation: Number
    """Model FLOPs per second divided by the peak of its devices"""
    data_wait: Annotated[DataWait | None, Field(description="Null if unknown, and in lists")] = None
    workers: list[str] = []
    """Worker of each node if there are several; empty in lists"""
    seconds: Annotated[float | None, Field(description="From first start to end, without pauses")]
    seconds_left: Annotated[float | None, Field(description="Estimate at the current speed")]
    waiting: Annotated[str | None, Field(description="What a queued run waits for")]
    waiting_for: list[NamedRun] = []
    """Runs named in `waiting`, in its order"""
    ahead: Annotated[int | None, Field(description="Queued runs that start before this one")]
    silent_seconds: int
    """Seconds since the last data of a watched run; 0 while it sends"""
    outcome: RunOutcome | None
    """Outcome in addition to the status; null if there is none"""
    stored_bytes: int
    """Size of its checkpoints and artifacts on the server"""
    damage: str
    """What cannot be read of it, by the latest check; empty: nothing"""
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    revision: int

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in ENDED

    @property
    def is_next(self) -> bool:
        """Whether the queue starts the run next: it can be trained, and none is ahead."""
        return (self.waiting or "").startswith(pending_reasons.NEXT)

    @property
    def loss_text(self) -> str:
        """The last known loss; "–" if none is known."""
        return number(self.loss) if self.own_steps else UNKNOWN

    @property
    def skipped_text(self) -> str:
        """The number of skipped steps; "–" without steps."""
        return count(self.skipped) if self.own_steps else UNKNOWN

    @property
    def applied_text(self) -> str:
        """The number of applied steps; "–" without steps."""
        return count(self.applied) if self.own_steps else UNKNOWN

    @property
    def last_line(self) -> str:
        """The last line of the error: the exception of a traceback."""
        lines = [line for line in (self.error or "").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    @property
    def trains(self) -> bool:
        """Whether an attempt exists."""
        return self.status in ACTIVE

    @property
    def reached(self) -> int:
        """The last step; that of its checkpoint until a fork has its own."""
        return max(self.step, self.parent_step or 0) if self.steps_total else self.step

    @property
    def progress(self) -> float:
        """Progress in per cent."""
        return 100 * min(self.reached / self.steps_total, 1.0) if self.steps_total else 0.0

    @property
    def is_watched(self) -> bool:
        """Whether it is a watched run, which cannot be controlled."""
        return self.source != RECIPE

    @property
    def is_command(self) -> bool:
        """Whether it is a command, run by a worker."""
        return self.source == COMMAND


def summarise(session: Session, run: Run, owner: str, settings: Settings) -> RunSummary:
    """Return the summary of a run."""
    summary = summarise_all(session, [(run, owner)], settings)[0]
    if wait := input_bound.data_wait(session, run):
        summary.data_wait = DataWait.model_validate(wait, from_attributes=True)
    if run.nodes > 1:
        summary.workers = workers.of_nodes(session, run)
    return summary


def summarise_all(
    session: Session,
    rows: Sequence[tuple[Run, str]],
    settings: Settings,
    queue: Queue | None = None,
) -> list[RunSummary]:
    """Return summaries of runs with their owners' names, in a few queries for all.

    queue: if it is already read.
    """
    return [RunSummary(**summary) for summary in summaries_as_json(session, rows, settings, queue)]


def summaries_as_json(
    session: Session,
    rows: Sequence[tuple[Run, str]],
    settings: Settings,
    queue: Queue | None = None,
) -> list[dict[str, Any]]:
    """Return summaries as JSON."""
    some_runs = [run for run, _owner in rows]
    if queue is None and any(run.status == Status.QUEUED for run in some_runs):
        queue = Queue.read(session)
    healths = scaling_health.health_of_runs(session, some_runs)
    progress, moment = runs.progress(
        session, some_runs
    )  # by the database's clock, which also wrote their starts
    return [
        {
            **dict(zip(_COLUMNS, _columns_of(run), strict=True)),
            "owner": owner,
            "tags": run_metadata.tags_of(run),
            "loss": run.known_loss,
            "own_steps": run.own_steps,
            "is_loss_nonfinite": bool(run.last_flags & NONFINITE_LOSS),
            "is_scaled": scaling_health.has_scaler(run),
            "applied": progress[run.id].applied,
            "outcome": run_outcome(run, progress[run.id].applied),
            "health": _health(healths.get(run.id)),
            "seconds": progress[run.id].seconds,
            "seconds_left": _seconds_left(run),
            "silent_seconds": runs.silent_seconds(run, moment),
            **_throughput(run),
            **_waiting(run, queue, settings),
        }
        for run, owner in rows
    ]


_COLUMNS = [
    *RunSummary.model_fields.keys() & (set(Run.__table__.columns.keys()) - {"tags", "loss"})
]
_columns_of = attrgetter(*_COLUMNS)


def _waiting(run: Run, queue: Queue | None, settings: Settings) -> dict[str, object]:
    if run.status != Status.QUEUED or queue is None:
        return {"waiting": None, "waiting_for": [], "ahead": None}
    reason = pending_reasons.reason(run, queue, **settings.per_user)
    named = [NamedRun(**run._asdict()) for run in reason.named]
    return {"waiting": reason.text, "waiting_for": named, "ahead": queue.places.get(run.id, 0)}


def _throughput(run: Run) -> dict[str, float | None]:
    """Return the throughput per second."""
    work, pace = run.workload or {}, run.steps_per_second or 0.0
    flops, peak = float(work.get("flops") or 0), float(work.get("peak_flops") or 0)
    return {
        "examples_per_second": pace * work["examples"] if work and pace else None,
        "tokens_per_second": pace * work["tokens"] if work.get("tokens") and pace else None,
        "utilisation": pace * flops / peak if flops and peak and pace else None,
    }


def _health(health: ScalingHealth | None) -> RunHealth | None:
    if health is None:
        return None
    figures = health.figures._asdict()
    figures["scale"] = json_safe(figures["scale"])
    return RunHealth(word=health.word, reason=health.reason, figures=figures)


def _seconds_left(run: Run) -> float | None:
    """Return the seconds that the remaining steps take; None before the speed is known."""
    if run.status != Status.RUNNING or run.recorded_steps < TIMED_AFTER:
        return None
    if not run.steps_per_second or not run.steps_total:
        return None
    return max(run.steps_total - run.step, 0) / run.steps_per_second
