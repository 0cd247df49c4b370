"""Data for comparing runs, read for all of them in a few queries."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from sqlalchemy import Select, bindparam, func, or_, select
from sqlalchemy.orm import Session, load_only

from db.names import natural_key
from db.tables import NOT_DELETED, RECIPE, LatestMetric, Run
from db.telemetry import latest_metrics, step_blocks
from db.telemetry.pyramid import STEP_SERIES

#: Limit of generations of forks that are followed to count examples.
GENERATIONS = 20


@dataclass(frozen=True)
class Examples:
    """Number of examples a run processed before its own steps and in each own step."""

    before: int
    each: int


@dataclass(frozen=True)
class Likely:
    """A suggested run for a comparison, with the reason."""

    id: int
    name: str
    why: str


def metric_names(session: Session, run_ids: Collection[int], *, most: int) -> list[str]:
    """Return at most `most` sorted metric names of runs, preferring the most shared ones.

    Of those equally shared, names that end in a number come last.
    """
    table = LatestMetric
    query = select(table.name, func.count()).where(table.run_id.in_(run_ids)).group_by(table.name)
    rows = sorted(
        session.execute(query),
        key=lambda row: (-row[1], latest_metrics.is_numbered(row[0]), natural_key(row[0])),
    )
    return sorted((name for name, _runs in rows[:most]), key=natural_key)


def drawn(session: Session, run_ids: Collection[int]) -> list[Run]:
    """Return runs with only the columns that charts need; skip unknown ids.

    While these objects are referenced, getting one by id in this session returns the same partial
    object.
    """
    return list(session.scalars(_drawn(), {"run_ids": list(run_ids)}))


@cache
def _drawn() -> Select[Run]:
    needed = load_only(Run.parent_id, Run.parent_step, Run.workload, raiseload=True)
    some = Run.id.in_(bindparam("run_ids", expanding=True))
    return select(Run).options(needed).where(some, NOT_DELETED)


def lowest_losses(session: Session, run_ids: Collection[int]) -> dict[int, float]:
    """Return the lowest finite loss of each run that has one."""
    at = [series.name for series in STEP_SERIES].index("loss")
    lows = {
        run_id: np.fmin.reduce(summaries.low[:, at], initial=np.inf)
        for run_id, summaries in step_blocks.largest(session.connection(), run_ids).items()
    }
    return {run_id: float(low) for run_id, low in lows.items() if np.isfinite(low)}


def examples(session: Session, some_runs: Sequence[Run]) -> dict[int, Examples]:
    """Return how to convert steps to examples, for runs where this is known.

    A fork continues its parent's count; its ancestors' own steps may have had other batch sizes.
    """
    known = {run.id: (run.parent_id, run.parent_step, _each(run)) for run in some_runs}
    for _ in range(GENERATIONS):
        parents = {parent for parent, _step, _each in known.values() if parent} - known.keys()
        if not parents:
            break
        query = select(Run.id, Run.parent_id, Run.parent_step, Run.workload)
        for row in session.execute(query.where(Run.id.in_(parents))):
            known[row.id] = (row.parent_id, row.parent_step, _each(row))

    def before(run_id: int, generation: int = 0) -> int | None:
        parent, step, _ = known[run_id]
        if not parent:
            return 0
        if parent not in known or generation > GENERATIONS or not (per_step := known[parent][2]):
            return None
        earlier = before(parent, generation + 1)
        own = (step or 0) - (known[parent][1] or 0)
        return None if earlier is None else earlier + own * per_step

    return {
        run.id: Examples(count, per_step)
        for run in some_runs
        if (per_step := _each(run)) and (count := before(run.id)) is not None
    }


def _each(run: object) -> int:
    workload = getattr(run, "workload", None) or {}
    return int(workload.get("examples") or 0)


def likely(session: Session, ids: Collection[int], *, most: int) -> list[Likely]:
    """Suggest runs to compare: parents, forks and groups first, then the same recipe.

    Measurements have no steps to compare.
    """
    own = select(Run.parent_id, Run.group_id, Run.recipe, Run.project).where(Run.id.in_(ids))
    shown = session.execute(own).all()
    parents = {run.parent_id for run in shown if run.parent_id}
    group_ids = {run.group_id for run in shown if run.group_id}
    columns = select(Run.id, Run.name, Run.parent_id, Run.group_id, Run.recipe, Run.project)
    is_training = or_(Run.source != RECIPE, Run.steps_total > 0)
    others = columns.where(Run.id.not_in(ids), is_training).order_by(Run.id.desc()).limit(most)
    of_family = (
        Run.id.in_(parents),
        Run.parent_id.in_([*ids, *parents]),
        Run.group_id.in_(group_ids),
    )
    suggested: dict[int, Likely] = {}
    for row in session.execute(others.where(or_(*of_family))):
        if row.id in parents:
            why = "the parent"
        elif row.parent_id in ids:
            why = f"a fork of run {row.parent_id}"
        elif row.group_id in group_ids:
            why = f"in group {row.group_id}"
        else:
            why = f"a fork of run {row.parent_id} too"
        suggested[row.id] = Likely(row.id, row.name, why)
    kind, value = _most_common(shown)
    if value:
        for row in session.execute(others.where(getattr(Run, kind) == value)):
            suggested.setdefault(row.id, Likely(row.id, row.name, value))
    return list(suggested.values())[:most]


def _most_common(shown: Sequence[object]) -> tuple[str, str]:
    """Return the most common recipe of runs, or without recipes the most common project."""
    for kind in ("recipe", "project"):
        of = Counter(getattr(run, kind) for run in shown if getattr(run, kind))
        if of:
            return kind, of.most_common(1)[0][0]
    return "recipe", ""
