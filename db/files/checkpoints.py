"""Files that runs leave behind, to resume from and to download."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from db.database import now
from db.errors import NotFound
from db.health.spikes import spikes
from db.paging import Page, page
from db.queue.queue import held
from db.tables import ACTIVE, RECIPE, CheckpointFile, ControlRequest, Diagnosis, Metric, Run, Status

#: So many spikes keep a checkpoint: a loss that never rests must not fill the disk.
SPIKES_HEEDED = 10
IS_SHARD = CheckpointFile.kind.startswith("shard.", autoescape=True)


def publish(
    session: Session, run_id: int, attempt: int, event: dict[str, Any], keys: Sequence[str]
) -> None:
    """Record the files of one checkpoint event, which lie in the store under keys by now.

    A key is empty where the file is on the training machine alone. Publishing again, after a resume
    or a replayed spool, replaces the rows; the same file stays in the store. Raises Fenced.
    """
    run = held(session, run_id, attempt)
    run.revision += 1
    run.files_revision = run.revision
    _forget_shards(session, run, event)
    for file, key in zip(event["files"], keys, strict=True):
        row = session.scalar(
            select(CheckpointFile).where(
                CheckpointFile.run_id == run_id,
                CheckpointFile.step == event["step"],
                CheckpointFile.kind == file["kind"],
            )
        )
        if row is None:
            row = CheckpointFile(run_id=run_id, step=event["step"], kind=file["kind"])
            session.add(row)
        is_same, before = row.sha256 == file["sha256"], row.stored_bytes
        row.key = key or (row.key if is_same else "")
        row.attempt, row.path, row.reason = attempt, file.get("path"), event["reason"]
        row.revision = run.revision
        row.size_bytes, row.sha256 = file["size_bytes"], file["sha256"]
        run.stored_bytes += row.stored_bytes - before
    if event.get("request"):
        session.execute(
            update(ControlRequest)
            .where(ControlRequest.run_id == run_id, ControlRequest.id <= event["request"])
            .where(ControlRequest.kind == "checkpoint", ControlRequest.acknowledged_at.is_(None))
            .values(acknowledged_at=now())
        )


def _forget_shards(session: Session, run: Run, event: dict[str, Any]) -> None:
    """Delete the rows of shards that this step had and has no more: there were more ranks, say."""
    kinds = {file["kind"] for file in event["files"]}
    if "checkpoint" not in kinds:
        return
    at = (CheckpointFile.run_id == run.id, CheckpointFile.step == event["step"])
    for row in session.scalars(select(CheckpointFile).where(*at, IS_SHARD)).all():
        if row.kind not in kinds:
            run.stored_bytes -= row.stored_bytes
            session.delete(row)


def of_run(session: Session, run_id: int) -> list[CheckpointFile]:
    """List a run's files, newest step first."""
    query = select(CheckpointFile).where(CheckpointFile.run_id == run_id)
    return list(session.scalars(query.order_by(CheckpointFile.step.desc(), CheckpointFile.kind)))


def newest_step(session: Session, run_id: int, *, before: int) -> int | None:
    """Return the step of a run's last whole state from before a step, or None without any."""
    query = select(func.max(CheckpointFile.step)).where(CheckpointFile.run_id == run_id)
    return session.scalar(
        query.where(CheckpointFile.kind == "checkpoint", CheckpointFile.step < before)
    )


def saves(session: Session, run_id: int) -> dict[int, dict[str, Any]]:
    """Return how the saves of a run's checkpoints went, by step, as their events told it.

    None of runs that are watched, and of those that an earlier version trained.
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
    """List whole states from the newest back: the first that is sound is the one to resume.

    A run that was started from another's checkpoint ends its list with that one.
    """
    own = [row for row in of_run(session, run.id) if row.kind == "checkpoint"]
    inherited = select(CheckpointFile).where(
        CheckpointFile.run_id == run.parent_id,
        CheckpointFile.step == run.parent_step,
        CheckpointFile.kind == "checkpoint",
    )
    return [*own, *session.scalars(inherited)]


def shards_of(
    session: Session, states: Sequence[CheckpointFile]
) -> dict[int, list[CheckpointFile]]:
    """Return the files in which the rest of these states lies, by the states' ids."""
    at = {(state.run_id, state.step): state.id for state in states}
    found: dict[int, list[CheckpointFile]] = {state.id: [] for state in states}
    runs = {state.run_id for state in states}
    for row in session.scalars(
        select(CheckpointFile).where(CheckpointFile.run_id.in_(runs), IS_SHARD)
    ):
        if (row.run_id, row.step) in at:
            found[at[row.run_id, row.step]].append(row)
    return found


def weights_at(session: Session, run_id: int, step: int | None) -> list[CheckpointFile]:
    """List a run's files of weights, one a module, as of a step; None: the newest that has any.

    Only what can be had from the store, and no averages.
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


def to_start_from(session: Session, config: dict[str, Any]) -> list[CheckpointFile]:
    """List the files of another run's weights that a configuration wants, if it wants any."""
    wanted = config.get("weights", {})
    if wanted.get("run") is None:
        return []
    return weights_at(session, wanted["run"], wanted["step"])


def retire(session: Session, run_id: int, attempt: int, policy: dict[str, Any]) -> list[str]:
    """Delete the rows that a run's policy does not keep; return the keys of their files.

    policy: the configuration's checkpoints; keep_last, keep_every_steps and keep_best, each None
    for no say. Only checkpoints saved at an interval are ever deleted, never the newest, none that
    another run started from, or is to with its weights, and none that is the last before one of the
    latest spikes of the loss. Raises Fenced.
    """
    run = held(session, run_id, attempt)
    if policy.get("keep_last") is None:
        return []
    rows = of_run(session, run_id)
    steps = sorted({row.step for row in rows if row.reason == "interval"})
    kept = {*steps[-policy["keep_last"] :], *steps[-1:], *best(session, run_id, steps, policy)}
    if every := policy.get("keep_every_steps"):
        kept |= {step for step in steps if step % every == 0}
    kept |= _before_spikes(session, run_id, steps)
    kept |= started_from(session, run_id)
    gone = [row for row in rows if row.reason == "interval" and row.step not in kept]
    for row in gone:
        session.delete(row)
    run.revision += 1
    if gone:
        run.files_revision = run.revision
        run.stored_bytes -= sum(row.stored_bytes for row in gone)
    return [row.key for row in gone]


def started_from(session: Session, run_id: int) -> set[int]:
    """Return the steps from which other runs started, or are to with their weights."""
    parents = session.scalars(select(Run.parent_step).where(Run.parent_id == run_id))
    return {step for step in parents if step is not None} | _awaited(session, run_id)


def _awaited(session: Session, run_id: int) -> set[int]:
    """Return the steps whose weights runs are to start from that are not over."""
    wanted = Run.config["weights"]
    query = select(wanted["step"].as_integer()).where(
        Run.status.in_([Status.QUEUED, Status.PAUSED, *ACTIVE]),
        Run.source == RECIPE,
        wanted["run"].as_integer() == run_id,
    )
    return {step for step in session.scalars(query) if step is not None}


def _before_spikes(session: Session, run_id: int, steps: list[int]) -> set[int]:
    """Return the last step before each of the latest spikes, of those that have a checkpoint."""
    latest = spikes(session, run_id, most=SPIKES_HEEDED)
    places = {bisect_left(steps, spike["step"]) for spike in latest}
    return {steps[place - 1] for place in places if place}


def best(session: Session, run_id: int, steps: list[int], policy: dict[str, Any]) -> Sequence[int]:
    """Return the step whose metric was best, of those that have a checkpoint."""
    if not (name := policy.get("keep_best")):
        return []
    order = Metric.value.desc() if policy.get("best_is", "highest") == "highest" else Metric.value
    query = select(Metric.step).where(
        Metric.run_id == run_id, Metric.name == name, Metric.step.in_(steps)
    )
    query = query.where(Metric.value.is_not(None)).order_by(order, Metric.step.desc()).limit(1)
    return session.scalars(query).all()
