"""The run list grouped by a common value, with counts, statuses and statistics.

Always one query: a figure's mean is a window function over its group, so that its deviation is
computed from squared distances to the mean, without the cancellation of a difference of squares.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Select,
    Subquery,
    Text,
    case,
    cast,
    false,
    func,
    literal,
    null,
    or_,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from db.runs.outcomes import OUTCOMES, has_outcome
from db.runs.run_filters import NUMBERS, SYNONYMS, Filter, is_metric, paths_of
from db.tables import NOT_DELETED, LatestMetric, Run, RunConfigValue, Status, Trial, User

MOST_GROUPS = 200
#: Runs of a group of which the ids are read.
MOST_IDS = 50
#: Larger figures count as nonfinite, because their squares could be.
LARGEST = 1e150
TAG, SWEEP = "tag", "sweep"
_OWNER = select(User.name).where(User.id == Run.owner_id).scalar_subquery()
_SWEEP = select(Trial.sweep_id).where(Trial.run_id == Run.id).scalar_subquery()
#: Columns to group by, apart from settings, tags and sweeps.
TEXTS: MappingProxyType[str, ColumnElement[str]] = MappingProxyType(
    {
        "recipe": Run.recipe.expression,
        "precision": Run.precision.expression,
        "project": Run.project.expression,
        "owner": _OWNER,
        "source": Run.source.expression,
    }
)
GROUPED_BY = (TAG, SWEEP, *TEXTS)
STATES = (*OUTCOMES, *map(str, Status))


@dataclass(frozen=True)
class Spread:
    """Statistics of a figure over runs."""

    count: int  # runs with a finite figure
    mean: float
    deviation: float | None  # sample standard deviation, None for one run
    lowest: float
    highest: float


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same value; None for runs without a value."""

    value: float | str | None
    runs: int
    newest: int
    statuses: dict[str, int]  # number of runs by status or outcome
    spreads: dict[str, Spread]  # by requested name
    ids: list[int]  # of its runs, empty if there are more than MOST_IDS


@dataclass(frozen=True)
class Grouped:
    """The first groups and their total number."""

    groups: list[RunGroup]
    total: int
    path: str  # of a setting with only one path, that path; else the requested name


class _place_of_comma(FunctionElement[int]):  # noqa: N801 - named like the SQL function that it is
    inherit_cache = True


@compiles(_place_of_comma, "sqlite")
def _on_sqlite(element: Any, compiler: SQLCompiler, **options: Any) -> str:
    return f"instr({compiler.process(element.clauses, **options)}, ',')"


@compiles(_place_of_comma, "postgresql")
def _on_postgresql(element: Any, compiler: SQLCompiler, **options: Any) -> str:
    return f"strpos({compiler.process(element.clauses, **options)}, ',')"


def group_runs(
    session: Session,
    by: str,
    *,
    names: Sequence[str] = (),
    conditions: Filter = (),
    sort: str = "-id",
) -> Grouped:
    """Group the runs that match all conditions.

    by: one of GROUPED_BY, or a setting.  names: names in NUMBERS, settings or metrics.  sort: one
    of the names for its mean, "runs" for the number of runs, the value of `by` for the common
    value; otherwise groups are sorted by their newest runs. A "-" prefix means descending.
    """
    paths = [] if by in GROUPED_BY else paths_of(session, by)
    falls, ordered = sort.startswith("-"), SYNONYMS.get(sort.lstrip("-"), sort.lstrip("-"))
    ordered = ordered if ordered in (*names, "runs", by) else "id"
    rows = session.execute(_aggregate(session, by, paths, names, conditions, ordered, falls)).all()
    path = paths[0] if len(paths) == 1 else by
    return Grouped([_group(row, names) for row in rows], rows[0].total if rows else 0, path)


def _aggregate(
    session: Session,
    by: str,
    paths: Sequence[str],
    names: Sequence[str],
    conditions: Filter,
    ordered: str,
    falls: bool,
) -> Select[Any]:
    runs = _with_means(_runs(session, by, paths, names, conditions), len(names))
    newest = func.max(runs.c.id)
    id_text = case((runs.c.size <= MOST_IDS, cast(runs.c.id, Text)))
    spreads: list[ColumnElement[Any]] = []
    for n in range(len(names)):
        value, mean = runs.c[f"value{n}"], runs.c[f"mean{n}"]
        squares = func.sum((value - mean) * (value - mean))
        parts = (func.count(value), func.min(mean), squares, func.min(value), func.max(value))
        spreads += [
            part.label(f"{part_of}{n}") for part, part_of in zip(parts, _PARTS, strict=True)
        ]
    states = [func.sum(case((runs.c.state == state, 1), else_=0)) for state in STATES]
    query = select(
        runs.c.number.label("number"),
        func.min(runs.c.text).label("text"),
        func.count().label("runs"),
        newest.label("newest"),
        func.aggregate_strings(id_text, ",").label("ids"),
        func.count().over().label("total"),
        *(count.label(f"state_{state}") for count, state in zip(states, STATES, strict=True)),
        *spreads,
    ).group_by(runs.c.number, runs.c.key)
    keys: list[Any] = [newest]
    if ordered == "runs":
        keys = [func.count()]
    elif ordered == by:
        keys = [runs.c.number, runs.c.key]
    elif ordered in names:
        keys = [func.min(runs.c[f"mean{list(names).index(ordered)}"])]
    ways = [key.desc().nulls_last() if falls else key.asc().nulls_last() for key in keys]
    return query.order_by(*ways, newest.desc()).limit(MOST_GROUPS)


_PARTS = ("count", "mean", "squares", "lowest", "highest")


def _with_means(runs: Subquery, count: int) -> Subquery:
    means = [
        func.avg(runs.c[f"value{n}"])
        .over(partition_by=(runs.c.number, runs.c.key))
        .label(f"mean{n}")
        for n in range(count)
    ]
    size = func.count().over(partition_by=(runs.c.number, runs.c.key)).label("size")
    return select(runs, size, *means).subquery()


def _runs(
    session: Session, by: str, paths: Sequence[str], names: Sequence[str], conditions: Filter
) -> Subquery:
    """Select the runs, each with its state, group value and figures."""
    paths_by_name = {name: paths_of(session, name) for name in _find_own(names)}
    all_paths = {*paths, *chain.from_iterable(paths_by_name.values())}
    settings = _settings(all_paths)
    metrics = _metrics(list(paths_by_name))
    number: ColumnElement[float] = cast(null(), Double)
    text: ColumnElement[str] = cast(null(), Text)
    tags = _tags()
    if by in TEXTS:
        text = TEXTS[by]
    elif by == SWEEP:
        number = cast(_SWEEP, Double)
    elif by == TAG:
        text = tags.c.tag
    elif paths:
        number = func.coalesce(*(settings.c[f"number:{path}"] for path in paths), null())
        text = func.coalesce(*(settings.c[f"text:{path}"] for path in paths), null())
    text = func.nullif(text, "")
    state = case(*((has_outcome(outcome), outcome) for outcome in OUTCOMES), else_=Run.status)
    values = [
        NUMBERS[SYNONYMS.get(name, name)]
        if name not in paths_by_name
        else func.coalesce(
            *(settings.c[f"number:{path}"] for path in paths_by_name[name]), metrics.c[name], null()
        )
        for name in names
    ]
    query = select(
        Run.id.label("id"),
        state.label("state"),
        number.label("number"),
        text.label("text"),
        func.lower(text).label("key"),
        *(_finite(value).label(f"value{n}") for n, value in enumerate(values)),
    ).where(NOT_DELETED, *(term.sql() for term in conditions))
    query = query.select_from(Run)
    for table, needed_by in ((settings, all_paths), (metrics, paths_by_name), (tags, by == TAG)):
        if needed_by:
            query = query.outerjoin(table, table.c.run_id == Run.id)
    return query.subquery()


def _find_own(names: Sequence[str]) -> list[str]:
    return [name for name in names if SYNONYMS.get(name, name) not in NUMBERS]


def _settings(paths: Collection[str]) -> Subquery:
    """Select settings, one row per run, with columns number:path and text:path."""
    columns = [
        func.max(case((RunConfigValue.path == path, column))).label(f"{kind}:{path}")
        for path in sorted(paths)
        for kind, column in (("number", RunConfigValue.number), ("text", RunConfigValue.text))
    ]
    last_parts = {path.rpartition(".")[2] for path in paths}
    condition = (RunConfigValue.name.in_(last_parts), RunConfigValue.path.in_(paths))
    query = select(RunConfigValue.run_id, *columns).where(*condition)
    return query.group_by(RunConfigValue.run_id).subquery()


def _metrics(names: Collection[str]) -> Subquery:
    """Select the latest metric values, one row per run, one column per name."""
    columns = [func.max(case((is_metric(name), LatestMetric.value))).label(name) for name in names]
    condition = or_(false(), *(is_metric(name) for name in names))
    query = select(LatestMetric.run_id, *columns).where(condition)
    return query.group_by(LatestMetric.run_id).subquery()


def _finite(value: ColumnElement[float]) -> ColumnElement[float]:
    number = cast(value, Double)
    return case((func.abs(number) <= LARGEST, number))


def _tags() -> Subquery:
    """Select each tag of each run by splitting at commas recursively."""
    whole = select(
        Run.id.label("run_id"),
        cast(literal(""), Text).label("tag"),
        Run.tags.concat(",").label("rest"),
    ).where(NOT_DELETED, Run.tags != "")
    parts = whole.cte("parts", recursive=True)
    comma = _place_of_comma(parts.c.rest)
    first = func.trim(func.substr(parts.c.rest, 1, comma - 1))
    more = select(parts.c.run_id, first, func.substr(parts.c.rest, comma + 1))
    split = parts.union_all(more.where(parts.c.rest != ""))
    return select(split.c.run_id, split.c.tag).where(split.c.tag != "").distinct().subquery()


def _group(row: Any, names: Sequence[str]) -> RunGroup:
    values = row._mapping
    statuses = {state: int(values[f"state_{state}"]) for state in STATES}
    spreads = {}
    for n, name in enumerate(names):
        count, mean, squares, lowest, highest = (values[f"{part}{n}"] for part in _PARTS)
        if count:
            deviation = math.sqrt(squares / (count - 1)) if count > 1 else None
            spreads[name] = Spread(count, mean, deviation, lowest, highest)
    return RunGroup(
        value=values["number"] if values["text"] is None else values["text"],
        runs=values["runs"],
        newest=values["newest"],
        statuses={state: count for state, count in statuses.items() if count},
        spreads=spreads,
        ids=sorted(map(int, values["ids"].split(","))) if values["ids"] else [],
    )
