"""Checkpoint files of runs, to resume from and to download."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, and_, func, not_, or_, select, update
from sqlalchemy.orm import Session

from db.clock import now
from db.errors import NotFound
from db.health.spikes import spikes
from db.paging import Page, page
from db.queue.queue import lock_active_attempt
from db.tables import (
    ACTIVE,
    ENDED,
    RECIPE,
    TRAIN,
    CheckpointFile,
    ControlRequest,
    Diagnosis,
    Run,
    Status,
)
from db.telemetry import metric_blocks
from halfstep.telemetry import events
from halfstep.telemetry.plain_json import JsonObject

#: Latest spikes that retain a checkpoint each: limited, since a noisy loss could fill the disk.
MOST_SPIKES = 10
IS_SHARD = CheckpointFile.kind.startswith("shard.", autoescape=True)


def publish(
    session: Session, run_id: int, attempt: int, event: events.Checkpoint, keys: Sequence[str]
) -> None:
    """Record the files of one checkpoint event, which are stored under these keys.

    A key is empty if the file exists only on the training machine. Publishing again, after a resume
    or a replayed spool, replaces the rows; an identical file stays in the store. Raises
    StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    run.revision += 1
    run.files_revision = run.revision
    _forget_shards(session, run, event)
    for file, key in zip(event.files, keys, strict=True):
        row = session.scalar(
            select(CheckpointFile).where(
                CheckpointFile.run_id == run_id,
                CheckpointFile.step == event.step,
                CheckpointFile.kind == file.kind,
            )
        )
        if row is None:
            row = CheckpointFile(run_id=run_id, step=event.step, kind=file.kind)
            session.add(row)
        is_same, before = row.sha256 == file.sha256, row.stored_bytes
        row.key = key or (row.key if is_same else "")
        row.attempt, row.path, row.reason = attempt, file.path, event.reason
        row.revision = run.revision
        row.size_bytes, row.sha256 = file.size_bytes, file.sha256
        run.stored_bytes += row.stored_bytes - before
    if event.request:
        session.execute(
            update(ControlRequest)
            .where(ControlRequest.run_id == run_id, ControlRequest.id <= event.request)
            .where(ControlRequest.kind == "checkpoint", ControlRequest.acknowledged_at.is_(None))
            .values(acknowledged_at=now())
        )


def _forget_shards(session: Session, run: Run, event: events.Checkpoint) -> None:
    """Delete the rows of this step's former shards: for example, there were more ranks before."""
    kinds = {file.kind for file in event.files}
    if "checkpoint" not in kinds:
        return
    at = (CheckpointFile.run_id == run.id, CheckpointFile.step == event.step)
    for row in session.scalars(select(CheckpointFile).where(*at, IS_SHARD)).all():
        if row.kind not in kinds:
            run.stored_bytes -= row.stored_bytes
            session.delete(row)


def of_run(session: Session, run_id: int) -> list[CheckpointFile]:
    """List a run's files, newest step first."""
    query = select(CheckpointFile).where(CheckpointFile.run_id == run_id)
    return list(session.scalars(query.order_by(CheckpointFile.step.desc(), CheckpointFile.kind)))


def newest_step(session: Session, run_id: int, *, before: int) -> int | None:
    """Return the step of a run's last checkpoint before a step, or None."""
    query = select(func.max(CheckpointFile.step)).where(CheckpointFile.run_id == run_id)
    return session.scalar(
        query.where(CheckpointFile.kind == "checkpoint", CheckpointFile.step < before)
    )


def saves(session: Session, run_id: int) -> dict[int, dict[str, object]]:
    """Return the checkpoint events of a run by step.

    Empty for watched runs and for runs of an earlier version.
    """
    steps = select(CheckpointFile.step).where(CheckpointFile.run_id == run_id)
    query = select(Diagnosis.step, Diagnosis.content).where(
        Diagnosis.run_id == run_id, Diagnosis.kind == "checkpoint", Diagnosis.step.in_(steps)
    )
    return {row.step: row.content for row in session.execute(query)}


def page_of_run(session: Session, run_id: int, *, after: str = "", limit: int) -> Page:
    """Return a page of a run's files, newest step first."""
    query = select(CheckpointFile).where(CheckpointFile.run_id == run_id)
    key = (CheckpointFile.step, CheckpointFile.id)
    return page(session, query, key, after=after, limit=limit, newest_first=True)


def get(session: Session, run_id: int, checkpoint_id: int) -> CheckpointFile:
    """Return one file of a run. Raises NotFound."""
    row = session.get(CheckpointFile, checkpoint_id)
    if row is None or row.run_id != run_id:
        raise NotFound(f"Run {run_id} has no checkpoint {checkpoint_id}.")
    return row


def to_resume(session: Session, run: Run) -> list[CheckpointFile]:
    """List checkpoints, newest first; the first intact one is the one to resume from.

    A run that continues another run's checkpoint has that checkpoint last.
    """
    own = [row for row in of_run(session, run.id) if row.kind == "checkpoint"]
    inherited = select(CheckpointFile).where(
        CheckpointFile.run_id == run.parent_id,
        CheckpointFile.step == run.parent_step,
        CheckpointFile.kind == "checkpoint",
    )
    return [*own, *session.scalars(inherited)]


def to_measure(session: Session, run: Run) -> dict[int, CheckpointFile | None]:
    """Return the checkpoints that a run measures instead of training, by step; None: missing."""
    if run.parent_id is None:
        return {}
    rows = {row.step: row for row in of_run(session, run.parent_id) if row.kind == "checkpoint"}
    return {step: rows.get(step) for step in list_measured_steps(run)}


def list_measured_steps(run: Run) -> list[int]:
    """Return the steps of the parent's checkpoints that a run measures instead of training."""
    steps = sorted(map(int, run.config["lab"].get("checkpoints", ())))
    return steps or [run.parent_step or 0]


def shards_of(
    session: Session, states: Sequence[CheckpointFile]
) -> dict[int, list[CheckpointFile]]:
    """Return the shard files of these checkpoints, by their ids."""
    at = {(state.run_id, state.step): state.id for state in states}
    shards: dict[int, list[CheckpointFile]] = {state.id: [] for state in states}
    runs = {state.run_id for state in states}
    for row in session.scalars(
        select(CheckpointFile).where(CheckpointFile.run_id.in_(runs), IS_SHARD)
    ):
        if (row.run_id, row.step) in at:
            shards[at[row.run_id, row.step]].append(row)
    return shards


def weights_at(session: Session, run_id: int, step: int | None) -> list[CheckpointFile]:
    """List a run's weights files of a step, one per module; None: the newest step with any.

    Only stored files, and no averaged weights.
    """
    query = select(CheckpointFile).where(
        CheckpointFile.run_id == run_id,
        or_(
            CheckpointFile.kind == "weights",
            CheckpointFile.kind.startswith("weights.", autoescape=True),
        ),
        CheckpointFile.key != "",
    )
    if step is None:
        step = session.scalar(query.with_only_columns(func.max(CheckpointFile.step)))
    return list(
        session.scalars(query.where(CheckpointFile.step == step).order_by(CheckpointFile.kind))
    )


def to_start_from(session: Session, config: JsonObject) -> list[CheckpointFile]:
    """List the weights files of another run that a configuration starts from, if any."""
    weights = config.get("weights", {})
    if weights.get("run") is None:
        return []
    return weights_at(session, weights["run"], weights["step"])


def prune(session: Session, run_id: int, attempt: int, policy: dict[str, Any]) -> list[str]:
    """Delete the rows that a run's policy does not retain; return the keys of their files.

    policy: the configuration's checkpoints section; keep_last, keep_every_steps and keep_best, each
    None if unset. Only checkpoints saved at an interval are ever deleted, and never the newest, one
    that another run started from or will start its weights from, or the last one before one of the
    latest spikes of the loss. Raises StaleAttempt.
    """
    run = lock_active_attempt(session, run_id, attempt)
    if policy.get("keep_last") is None:
        return []
    rows = of_run(session, run_id)
    steps = sorted({row.step for row in rows if row.reason == "interval"})
    retained = {*steps[-policy["keep_last"] :], *steps[-1:], *best(session, run_id, steps, policy)}
    if every := policy.get("keep_every_steps"):
        retained |= {step for step in steps if step % every == 0}
    retained |= _before_spikes(session, run_id, steps)
    retained |= find_steps_started_from(session, run_id)
    deleted = [row for row in rows if row.reason == "interval" and row.step not in retained]
    for row in deleted:
        session.delete(row)
    run.revision += 1
    if deleted:
        run.files_revision = run.revision
        run.stored_bytes -= sum(row.stored_bytes for row in deleted)
    return [row.key for row in deleted]


def find_steps_started_from(session: Session, run_id: int) -> set[int]:
    """Return the steps that other runs started from, will start their weights from, or measure."""
    parents = session.scalars(
        select(Run.parent_step).where(Run.parent_id == run_id, uses_parent(Run))
    )
    waiting = select(Run).where(Run.parent_id == run_id, _measures(Run), Run.status.not_in(ENDED))
    measured = {step for run in session.scalars(waiting) for step in list_measured_steps(run)}
    return (
        {step for step in parents if step is not None}
        | measured
        | _find_awaited_steps(session, run_id)
    )


def uses_parent(run: type[Run]) -> ColumnElement[bool]:
    """Return the condition that a run needs its parent's checkpoints: no ended measurement does."""
    return or_(not_(_measures(run)), run.status.not_in(ENDED))


def _measures(run: type[Run]) -> ColumnElement[bool]:
    task = func.coalesce(run.config["lab"]["task"].as_string(), TRAIN)
    return and_(run.source == RECIPE, task != TRAIN)


def _find_awaited_steps(session: Session, run_id: int) -> set[int]:
    """Return the steps that unended runs start their weights from."""
    weights = Run.config["weights"]
    query = select(weights["step"].as_integer()).where(
        Run.status.in_([Status.QUEUED, Status.PAUSED, *ACTIVE]),
        Run.source == RECIPE,
        weights["run"].as_integer() == run_id,
    )
    return {step for step in session.scalars(query) if step is not None}


def _before_spikes(session: Session, run_id: int, steps: list[int]) -> set[int]:
    """Return the last checkpointed step before each of the latest spikes."""
    latest = spikes(session, run_id, most=MOST_SPIKES)
    positions = {bisect_left(steps, spike["step"]) for spike in latest}
    return {steps[position - 1] for position in positions if position}


def best(session: Session, run_id: int, steps: list[int], policy: dict[str, Any]) -> Sequence[int]:
    """Return the checkpointed step with the best value of the policy's metric."""
    if not (name := policy.get("keep_best")):
        return []
    points = metric_blocks.points_at(session.connection(), run_id, name, steps)
    points = points[~np.isnan(points.values[:, 0])]
    values = points.values[:, 0] * (1 if policy.get("best_is", "highest") == "highest" else -1)
    return [int(points.step[values == values.max()][-1])] if len(values) else []
