"""Submission, listing and status of runs."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    bindparam,
    case,
    func,
    literal,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.orm import Session, load_only

from db import clock
from db.alerts import notifications
from db.clock import now
from db.errors import Conflict, InTrash, Invalid, NotFound
from db.runs import config_values
from db.runs.run_filters import MOST_KEPT, NUMBERS, ORDERS, Compared, Filter, Has, Order, Term
from db.tables import (
    ACTIVE,
    COMMAND,
    ENDED,
    NOT_DELETED,
    RECIPE,
    TRAIN,
    WATCH,
    CheckpointFile,
    Diagnosis,
    Run,
    RunStatus,
    Status,
    User,
)
from db.telemetry import latest_metrics, step_blocks
from halfstep.telemetry.plain_json import JsonObject

#: Uploaders report every few seconds; a longer silence than this is shown.
SILENCE_SECONDS = 30.0
IN_THE_TRASH = "Run {} was deleted. It is in the trash, where it can be restored."
GONE = "Run {} was deleted permanently."


class Progress(NamedTuple):
    """Progress of a run."""

    applied: int  # own steps that changed the weights: not skipped, or retried in fp32
    seconds: float | None  # duration without pauses; None before the start


def submit(session: Session, owner: User, run: Run) -> Run:
    """Queue a new run behind the others of its priority. It must be validated.

    It does not start before the run `after_id` has ended. It starts from the checkpoint
    `parent_step` of the run `parent_id` and continues its step count, or measures it instead of
    training. Sets what follows from its configuration: source, precision, steps and a missing name.
    Raises Invalid for a run or a checkpoint that does not exist.
    """
    if run.after_id is not None:
        check_not_deleted(session.get(Run, run.after_id), "after_id", run.after_id)
    if run.parent_id is not None:
        _check_parent(session, run.recipe, run.config, run.parent_id, run.parent_step)
    if run.command is not None:
        run.source, run.recipe, run.precision, run.steps_total = COMMAND, "", "", 0
    else:
        run.precision, task = run.config["precision"], run.config.get("lab", {}).get("task", TRAIN)
        run.steps_total = run.config["training"]["steps"] if task == TRAIN else 0
        ending = run.precision if task == TRAIN else task.replace("_", "-")
        run.name = run.name or f"{run.recipe}-{ending}"
    run.owner_id = owner.id
    run.position = session.scalars(select(func.coalesce(func.max(Run.position), 0.0) + 1.0)).one()
    session.add(run)
    session.flush()
    config_values.note(session, run)
    set_status(session, run, Status.QUEUED, reason=f"submitted by {owner.name}")
    if run.parent_id is not None:
        _show_fork(session, run.parent_id, run.parent_step)
    return run


def _check_parent(
    session: Session, recipe: str, config: JsonObject, parent_id: int, parent_step: int | None
) -> None:
    """Check that a run can start from another's checkpoint. Raises Invalid."""
    parent = check_not_deleted(session.get(Run, parent_id), "parent_id", parent_id)
    steps = session.scalars(
        select(CheckpointFile.step)
        .where(CheckpointFile.run_id == parent_id, CheckpointFile.kind == "checkpoint")
        .order_by(CheckpointFile.step)
    ).all()
    has = f"has them at {', '.join(f'{step:,}' for step in steps)}" if steps else "has none"
    if parent_step not in steps:
        at = "" if parent_step is None else f" at step {parent_step:,}"
        message = f"there is no checkpoint{at}; run {parent_id} {has}"
        raise Invalid({"parent_step": message})
    check_has_recipe(parent, "be started from")
    if (of := parent.recipe) != recipe:
        raise Invalid({"recipe": f"{recipe} cannot start from a checkpoint of {of}"})
    lab = config.get("lab", {})
    if missing := [step for step in lab.get("checkpoints", ()) if int(step) not in steps]:
        message = f"{missing[0]} is not valid; run {parent_id} {has}"
        raise Invalid({"lab.checkpoints": message})
    if lab.get("task", TRAIN) == TRAIN and config["training"]["steps"] <= parent_step:
        total = f"{config['training']['steps']:,} steps in all"
        message = f"{total} are not beyond the checkpoint's step {parent_step:,}; allowed: more"
        raise Invalid({"training.steps": message})


def _show_fork(session: Session, parent_id: int, parent_step: int | None) -> None:
    """Mark the parent's checkpoint as changed, so that its pages show the new fork."""
    parent = get(session, parent_id, lock=True)
    parent.revision += 1
    parent.files_revision = parent.revision
    at = (CheckpointFile.run_id == parent_id, CheckpointFile.step == parent_step)
    shown = update(CheckpointFile).where(*at).values(revision=parent.revision)
    if (
        session.execute(shown.returning(CheckpointFile.id)).first() is None
    ):  # deleted since the check
        raise Invalid({"parent_step": f"the checkpoint at step {parent_step:,} no longer exists"})


def check_not_deleted(run: Run | None, field: str, run_id: int) -> Run:
    """Return a run that another will refer to; raise Invalid for the field if deleted."""
    if run is None or run.erasing:
        raise Invalid({field: f"there is no run {run_id}"})
    if run.deleted_at is not None:
        raise Invalid({field: f"run {run_id} is in the trash; allowed: a run that is not deleted"})
    return run


def check_is_ours(run: Run, what: str) -> None:
    """Check that Halfstep started a run's training. Raises Conflict."""
    if run.source == WATCH:
        text = f"Run {run.id} is watched, not trained by Halfstep: it cannot {what}."
        raise Conflict(text)


def check_has_recipe(run: Run, what: str) -> None:
    """Check that a run uses Halfstep's training loop. Raises Conflict."""
    check_is_ours(run, what)
    if run.source != RECIPE:
        raise Conflict(
            f"Run {run.id} is a command, whose loop Halfstep does not control: it cannot {what}."
        )


def get(session: Session, run_id: int, *, lock: bool = False) -> Run:
    """Return a run. lock: against other writers. Raises NotFound, InTrash if deleted."""
    run = session.get(Run, run_id, with_for_update=lock or None)
    if run is None:
        raise NotFound(f"There is no run {run_id}.")
    if run.deleted_at is not None:
        raise NotFound(GONE.format(run_id)) if run.erasing else InTrash(IN_THE_TRASH.format(run_id))
    return run


def newest(
    session: Session,
    *,
    conditions: Filter = (),
    sort: str = "-id",
    before: int | None = None,
    limit: int = 50,
) -> list[tuple[Run, str]]:
    """List runs with their owners' names, by default newest first.

    conditions: all must hold.  sort: one of ORDERS, or the name of a setting or metric; a "-"
    prefix means descending.  before: a run id for paging: list the runs after it in the order.
    """
    rows = _page(session, conditions, sort, before, limit)
    return [(run, owner) for run, owner in rows]


#: Statuses of the list's band of active runs.
NOT_ENDED = tuple(status for status in Status if status not in ENDED)


class ListPage(NamedTuple):
    """Runs of one page with their owners' names."""

    rows: list[tuple[Run, str]]
    total: int  # of all pages
    metrics: list[str]  # the first metric of each run that has one; those of evaluations come first


def page_of_list(
    session: Session,
    *,
    conditions: Filter,
    sort: str,
    before: int | None = None,
    after: int | None = None,
    limit: int,
) -> ListPage:
    """List runs like `newest`, with what a page of the list says of them, by one query.

    For a first page, one filter pass serves both. Without a filter all runs are counted by an
    index, and the newest are read without reading the others.  after: a run id for paging
    backwards: list the runs right ahead of it in the order.
    """
    rows = _page(session, conditions, sort, before, limit, after=after, counts=True)
    if not rows:
        is_first = before is None and after is None
        return ListPage([], 0 if is_first else count(session, conditions), [])
    listed = [(run, owner) for run, owner, _total, _metric in rows]
    return ListPage(listed, rows[0].total, [row.metric for row in rows if row.metric])


def count_ahead(session: Session, run_id: int, *, conditions: Filter, sort: str) -> int:
    """Count the runs that stand ahead of a run in a list."""
    order = Order.of(session, sort)
    first = _keys_of(session, run_id, order)
    if first is None:
        return 0
    query = _matching(select(func.count()), conditions, order)
    return session.scalar(query.where(_is_beyond(order, first, falls=not order.falls))) or 0


def count(session: Session, conditions: Filter = ()) -> int:
    """Count the runs that `newest` would list on all pages."""
    return session.scalar(_matching(select(func.count()), conditions)) or 0


def count_matching(conditions: Filter, *, most: int | None = None) -> ColumnElement[int | None]:
    """Return the number of runs that match, for a query of several such numbers.

    most: if there are more runs, count none of them, and be NULL.
    """
    query = _matching(select(func.count()), conditions)
    # Else SQLite finds runs by their status or owner, and reads the long row of each.
    query = query.with_hint(Run, "INDEXED BY ix_runs_listed", "sqlite")
    count: ColumnElement[int | None] = query.scalar_subquery()
    if most is None:
        return count
    newest = select(func.max(Run.id)).where(NOT_DELETED).scalar_subquery()
    return case((func.coalesce(newest, 0) <= most, count), else_=None)


def sum_stored_bytes(session: Session) -> int:
    """Return the stored bytes of the files of all runs outside the trash."""
    return int(session.scalar(select(func.sum(Run.stored_bytes)).where(NOT_DELETED)) or 0)


def _page(
    session: Session,
    conditions: Filter,
    sort: str,
    before: int | None,
    limit: int,
    *,
    after: int | None = None,
    counts: bool = False,
) -> Sequence[Any]:
    """Read a page of runs with their owners' names. counts: also their total number."""
    order, given = Order.of(session, sort), {"limit": limit}
    beside = after if before is None else before
    if beside is not None:
        last = _keys_of(session, beside, order)
        if last is None:
            return []
        given |= {f"last_{n}": value for n, value in enumerate(last)}
    is_backwards = before is None and after is not None
    read = replace(order, falls=not order.falls) if is_backwards else order
    query = _page_query(tuple(conditions), read, is_first=beside is None, counts=counts)
    rows = session.execute(query, given).all()
    return rows[::-1] if is_backwards else rows


def _is_beyond(order: Order, keys: Sequence[object], *, falls: bool) -> ColumnElement[bool]:
    """Return whether a run stands beyond these sort keys, in an order that falls or rises."""
    place, last = tuple_(*order.keys), tuple_(*keys)
    return place < last if falls else place > last


@lru_cache(MOST_KEPT)  # slow to build, and the same list is requested repeatedly
def _page_query(
    conditions: tuple[Term, ...], order: Order, *, is_first: bool, counts: bool
) -> Select[Any]:
    """Select a page of runs.

    Rows are long, so sorting uses only ids and keys, and full rows are read only for the page.
    """
    has_bands = order.keys[0] is ORDERS["active"]
    is_counted = is_first and not has_bands  # by the pass that reads the page
    more = [_total(conditions, is_first=is_counted).label("total")] if counts else []
    keys = [key.label(f"key_{n}") for n, key in enumerate(order.keys)]
    limit = bindparam("limit", type_=Integer())
    query = _matching(select(Run.id.label("run_id"), *keys, *more), conditions, order)
    if not is_first:
        ends = [bindparam(f"last_{n}", type_=key.type) for n, key in enumerate(order.keys)]
        query = query.where(_is_beyond(order, ends, falls=order.falls))
    if has_bands:  # each is in the order of an index, both together are in that of none
        bands = (
            _order(query.where(is_in), [Run.id.expression], falls=order.falls)
            .limit(limit)
            .subquery()
            for is_in in (Run.status.in_(NOT_ENDED), Run.status.not_in(NOT_ENDED))
        )
        both = union_all(*map(select, bands)).subquery()
        both_keys = [both.c[key.name] for key in keys]
        page = _order(select(both), both_keys, falls=order.falls).limit(limit)
    else:
        page = _order(query, order.keys, falls=order.falls).limit(limit)
    shown = page.subquery()
    metric = latest_metrics.first_name(Run.id.expression).correlate(Run).scalar_subquery()
    first = [metric.label("metric")] if counts else []
    rows = select(Run, User.name, *(shown.c[column.name] for column in more), *first)
    rows = rows.join(shown, shown.c.run_id == Run.id).join(User, User.id == Run.owner_id)
    keys_shown = [shown.c[key.name] for key in keys]
    ordered: Select[Any] = _order(rows, keys_shown, falls=order.falls)
    return ordered


def _total(conditions: tuple[Term, ...], *, is_first: bool) -> ColumnElement[int]:
    if is_first and conditions:
        return func.count().over()
    of_all = _matching(select(func.count()), conditions)
    count: ColumnElement[int] = of_all.correlate(None).scalar_subquery()
    return count


def _order(query: Any, keys: Iterable[ColumnElement[Any]], *, falls: bool) -> Any:
    return query.order_by(*(key.desc() if falls else key for key in keys))


def _keys_of(session: Session, run_id: int, order: Order) -> Sequence[Any] | None:
    """Return the sort keys of a run; for an order by id the run need not exist."""
    if len(order.keys) == 1:
        return (run_id,)
    of_run = _join(select(*order.keys), order).where(Run.id == run_id)
    row = session.execute(of_run).one_or_none()
    if row is None and order.keys[0] is ORDERS["active"]:
        return (0, run_id)  # erased since, so it had ended
    return row


def _matching(query: object, conditions: Filter, order: Order | None = None) -> Any:
    # SQLite evaluates in this order: conditions on other tables come last, for fewer runs.
    terms = sorted(conditions, key=lambda term: isinstance(term.condition, Has | Compared))
    return _join(query, order).where(NOT_DELETED, *(term.sql() for term in terms))


def _join(query: Any, order: Order | None) -> Any:
    query = query.select_from(Run)
    return order.join_to(query) if order else query


def find_watched(session: Session, watch_id: str) -> int:
    """Return the id of the newest run with a watched run's identifier. Raises NotFound."""
    run_id = session.scalar(select(func.max(Run.id)).where(Run.watch_id == watch_id))
    if run_id is None:
        raise NotFound("There is no such run here yet: its script may still be sending it.")
    return run_id


def with_owners(session: Session, run_ids: Collection[int]) -> list[tuple[Run, str]]:
    """Return runs with their owners' names, newest first; skip unknown ids."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id)
    query = query.where(Run.id.in_(run_ids), NOT_DELETED).order_by(Run.id.desc())
    return [(run, owner) for run, owner in session.execute(query)]


def with_settings(session: Session, run_ids: Collection[int]) -> list[Run]:
    """Return runs with only the columns that their settings are read from; skip unknown ids."""
    columns = (Run.source, Run.recipe, Run.command, Run.precision, Run.config, Run.script_config)
    query = select(Run).options(load_only(*columns, raiseload=True))
    return list(session.scalars(query.where(Run.id.in_(run_ids), NOT_DELETED)))


def get_with_owner(session: Session, run_id: int) -> tuple[Run, str]:
    """Return a run with its owner's name. Raises NotFound."""
    run = get(session, run_id)
    owner = session.connection().scalar(_name_query(), {"user_id": run.owner_id})
    return run, owner


@cache
def _name_query() -> Any:
    return select(User.name).where(User.id == bindparam("user_id"))


def forks(session: Session, run_id: int) -> list[Run]:
    """List the runs that started from a checkpoint of this one, oldest first."""
    query = select(Run).where(Run.parent_id == run_id, NOT_DELETED)
    return list(session.scalars(query.order_by(Run.id)))


def open_forks(session: Session, run_id: int, step: int, *, most: int) -> Sequence[Run]:
    """Return the forks from a checkpoint that have not ended, oldest first."""
    at = (Run.parent_id == run_id, Run.parent_step == step)
    query = select(Run).where(*at, Run.status.not_in(ENDED), NOT_DELETED).order_by(Run.id)
    return session.scalars(query.limit(most)).all()


def projects_of(session: Session, run_ids: Collection[int]) -> dict[int, str]:
    """Return the projects of these runs, by id; those that do not exist are missing."""
    rows = session.execute(select(Run.id, Run.project).where(Run.id.in_(run_ids)))
    return {row.id: row.project for row in rows}


def newest_id(session: Session) -> int:
    """Return the id of the newest run, or 0 if there is none."""
    return session.scalar(select(func.max(Run.id)).where(NOT_DELETED)) or 0


class State(NamedTuple):
    """State of a run that a live stream compares to detect changes."""

    revision: int
    status: Status
    silent_seconds: int  # as `silent_seconds` returns it


def states(session: Session, run_ids: Collection[int]) -> dict[int, State]:
    """Return the state of each of these runs that exists."""
    rows = session.connection().execute(_states_query(), {"run_ids": list(run_ids)})
    return {
        row.id: State(row.revision, row.status, silent_seconds(row, row.moment)) for row in rows
    }


@cache
def _states_query() -> Select[int, int, Status, float | None, float]:
    columns = (Run.id, Run.revision, Run.status, Run.last_report_at, now().label("moment"))
    return select(*columns).where(Run.id.in_(bindparam("run_ids", expanding=True)))


def silent_seconds(run: Any, moment: float) -> int:
    """Return the seconds since a watched run's last report, 0 if recent or not running.

    The value is rounded down to a readable number, so that a page that shows it rarely changes.
    """
    if run.last_report_at is None or run.status != Status.RUNNING:
        return 0
    seconds = moment - run.last_report_at
    if seconds < SILENCE_SECONDS:
        return 0
    unit = next(unit for most, unit in ((120, 10), (7200, 60), (math.inf, 3600)) if seconds < most)
    return int(seconds // unit * unit)


def progress(session: Session, some_runs: Collection[Run]) -> tuple[dict[int, Progress], float]:
    """Return the progress of runs and the database's time."""
    unskipped, retrying = _count_unskipped(some_runs), _retrying(some_runs)
    query = _progress(retrying=bool(retrying))
    given = {"run_ids": list(unskipped), "retrying": retrying}
    rows = session.connection().execute(query, given).all()
    progress = {row[0]: Progress(unskipped[row[0]] + row[1], row[2]) for row in rows}
    return progress, rows[0][3] if rows else 0.0


@cache  # SQLAlchemy takes longer to build this than the database to answer it
def _progress(*, retrying: bool) -> Select[Any]:
    retried = _count_retried() if retrying else literal(0)
    mine = Run.id.in_(bindparam("run_ids", expanding=True))
    return select(Run.id, retried, NUMBERS["duration"], now()).where(mine)


def ends(session: Session, run_ids: Collection[int]) -> list[tuple[float, int]]:
    """Return end time and id of each of these runs that has ended."""
    query = select(Run.ended_at, Run.id).where(Run.id.in_(run_ids), Run.status.in_(ENDED))
    return [(ended_at or 0.0, run_id) for ended_at, run_id in session.execute(query)]


def statuses(session: Session, run_id: int) -> list[RunStatus]:
    """Return the history of a run's status, oldest first."""
    return list(session.scalars(_statuses(), {"run_id": run_id}))


@cache
def _statuses() -> Select[RunStatus]:
    query = select(RunStatus).where(RunStatus.run_id == bindparam("run_id"))
    return query.order_by(RunStatus.id)


class StatusChange(NamedTuple):
    """A change of a run's status."""

    time: float
    reason: str | None
    failure_kind: str | None


def last_change(session: Session, run_id: int) -> StatusChange | None:
    """Return the last status change of a run, ignoring later remarks."""
    row = session.connection().execute(_last_change(), {"run_id": run_id}).one_or_none()
    return StatusChange(*row) if row else None


@cache
def _last_change() -> Any:
    table, run_id = RunStatus.__table__.c, bindparam("run_id", type_=Integer())
    mine = table.run_id == run_id
    status = select(Run.__table__.c.status).where(Run.id == run_id).scalar_subquery()
    before = select(func.max(table.id)).where(mine, table.status != status).scalar_subquery()
    since = select(*(table[name] for name in StatusChange._fields))
    return since.where(mine, table.id > func.coalesce(before, 0)).order_by(table.id).limit(1)


def count_applied_of(session: Session, some_runs: Collection[Run]) -> dict[int, int]:
    """Count each run's own steps that changed the weights: not skipped, or retried in fp32."""
    retrying = _retrying(some_runs)
    query = select(Run.id, _count_retried()).where(
        Run.id.in_(bindparam("retrying", expanding=True))
    )
    rows = session.execute(query, {"retrying": retrying}) if retrying else ()
    retried = {row[0]: row[1] for row in rows}
    unskipped = _count_unskipped(some_runs)
    return {run_id: steps + retried.get(run_id, 0) for run_id, steps in unskipped.items()}


def _count_unskipped(some_runs: Iterable[Run]) -> dict[int, int]:
    return {run.id: run.own_steps - run.skipped - run.not_stepped for run in some_runs}


def _retrying(some_runs: Iterable[Run]) -> list[int]:
    """Return the ids of the runs that retry skipped steps in fp32."""
    return [run.id for run in some_runs if run.settings.get("scaler", {}).get("retry_in_fp32")]


def _count_retried() -> ColumnElement[int]:
    """Return the number of skipped steps of a run that a retry applied.

    It is 0 for runs that are not in the parameter `retrying`.
    """
    mine = (Diagnosis.run_id == Run.id, Diagnosis.kind == "retry")
    # In the spool, a retry precedes its step.
    applied = Diagnosis.content["applied"].as_boolean() & (Diagnosis.step <= Run.step)
    count = select(func.count()).select_from(Diagnosis).where(*mine, applied).correlate(Run)
    retrying = Run.id.in_(bindparam("retrying", expanding=True))
    return case((retrying, count.scalar_subquery()), else_=0)


def set_status(
    session: Session,
    run: Run,
    status: Status,
    *,
    reason: str | None = None,
    failure_kind: str | None = None,
) -> None:
    """Change a run's status and record the time and reason in its history."""
    run.status, run.failure_kind = status, failure_kind
    if status != Status.QUEUED:
        run.first_since = run.reservation = None
    if status in ENDED:
        run.ended_at = clock.current(session)
        pace = step_blocks.steps_per_second(session.connection(), run.id)
        run.steps_per_second = pace or run.steps_per_second
    if status not in ACTIVE:
        notifications.notify(session, notifications.SIGNED_IN)
    remark(session, run, reason, failure_kind=failure_kind)


def remark(
    session: Session, run: Run, reason: str | None, *, failure_kind: str | None = None
) -> None:
    """Add a remark with the current status to a run's history."""
    run.revision = (run.revision or 0) + 1
    session.add(
        RunStatus(
            run_id=run.id,
            attempt=run.attempt,
            status=run.status,
            reason=reason,
            failure_kind=failure_kind,
        )
    )
    session.flush()
