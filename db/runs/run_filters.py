"""SQL conditions and sort orders of run lists.

app/runs/filters.py parses filters; this module translates them to SQL. A name is one of NUMBERS, or
else a setting (by its path or the last part of it) or a metric (by its latest value). The prefixes
"metrics." and "settings." select a metric or a setting even if a column has the same name.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Double,
    Select,
    and_,
    bindparam,
    case,
    false,
    func,
    inspect,
    literal,
    not_,
    or_,
    select,
    union_all,
)
from sqlalchemy.orm import Session, aliased

from db import clock
from db.clock import now
from db.queue.feasibility import is_infeasible
from db.runs.outcomes import RunOutcome, has_outcome
from db.tables import (
    ACTIVE,
    ENDED,
    LatestMetric,
    Run,
    RunConfigValue,
    RunStatus,
    Status,
    Trial,
    User,
)

COMPARISONS: MappingProxyType[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ">": operator.gt,
        ">=": operator.ge,
        "<": operator.lt,
        "<=": operator.le,
        "=": operator.eq,
    }
)
#: Alternative names of columns and short names of settings.
SYNONYMS = MappingProxyType({"skips": "skipped", "speed": "steps_per_second"})
SHORT_NAMES = MappingProxyType({"lr": "learning_rate", "learning_rate": "lr"})
METRICS, SETTINGS = "metrics.", "settings."
#: A first attempt in any other status has not been paused.
_PERHAPS_PAUSED = (Status.PAUSED, Status.QUEUED, Status.CANCELLED)


def seconds_until(moment: object) -> ColumnElement[float]:
    """Return a run's duration in seconds since its first start, without pauses."""
    paused, later = aliased(RunStatus), aliased(RunStatus)
    after = select(later.time).where(later.run_id == paused.run_id, later.id > paused.id)
    resumed_at = after.order_by(later.id).limit(1).correlate(paused).scalar_subquery()
    pauses = select(func.sum(func.coalesce(resumed_at, moment) - paused.time)).where(
        paused.run_id == Run.id, paused.status == Status.PAUSED, paused.time >= Run.started_at
    )
    total = func.coalesce(pauses.correlate(Run).scalar_subquery(), 0.0)
    may_have_paused = or_(Run.attempt > 1, Run.status.in_(_PERHAPS_PAUSED))
    return (
        func.coalesce(Run.ended_at, moment)
        - Run.started_at
        - case((may_have_paused, total), else_=0.0)
    )


#: Columns compared as numbers.
NUMBERS: MappingProxyType[str, ColumnElement[Any]] = MappingProxyType(
    {
        "id": Run.id.expression,
        "step": Run.step.expression,
        "skipped": Run.skipped.expression,
        "loss": Run.loss.expression,
        # A loop without a scaler records 1 in each step.
        "scale": case((or_(Run.scale != 1, Run.skipped > 0), Run.scale)),
        "priority": Run.priority.expression,
        "steps_per_second": Run.steps_per_second.expression,
        "attempt": Run.attempt.expression,
        "duration": seconds_until(now()),
        "stored_bytes": Run.stored_bytes.expression,
    }
)
#: Columns compared with a whole text; a name by a substring, tags by one tag.
TEXTS: MappingProxyType[str, ColumnElement[str]] = MappingProxyType(
    {
        "name": Run.name.expression,
        "precision": Run.precision.expression,
        "tag": Run.tags.expression,
        "recipe": Run.recipe.expression,
        "owner": User.name.expression,
        "project": Run.project.expression,
        "source": Run.source.expression,
    }
)
#: Sort keys of runs, apart from settings and metrics.
ORDERS: MappingProxyType[str, ColumnElement[Any]] = MappingProxyType(
    {
        **NUMBERS,
        **{name: column for name, column in TEXTS.items() if name != "tag"},
        "tags": Run.tags.expression,
        "status": Run.status.expression,
        "created": Run.created_at.expression,
        "active": case((Run.status.in_(ENDED), 0), else_=1),
    }
)
#: Names with a meaning other than a metric in filters, sort orders or lists of columns.
TAKEN = frozenset(
    {*ORDERS, *TEXTS, *SYNONYMS}
    | {"since", "before", "sweep", "has", "health", "size", "device", "runs"}
)
#: Limit of paths that are searched for a setting given by the last part of its path.
MOST_PATHS = 5
#: Cache size for queries built from names that users type.
MOST_KEPT = 200


@dataclass(frozen=True)
class Word:
    """A text anywhere in name, recipe, precision, tags, owner or project."""

    text: str

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        text = self.text.lower()
        named = select(User.id).where(func.lower(User.name).contains(text, autoescape=True))
        return _ROW.contains(text, autoescape=True) | Run.owner_id.in_(named)


@dataclass(frozen=True)
class InStatus:
    """A status in a set of statuses."""

    statuses: tuple[Status, ...]

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        return Run.status.in_(self.statuses)


@dataclass(frozen=True)
class EndedAs:
    """An outcome as defined in db.runs.outcomes."""

    outcome: RunOutcome

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        return has_outcome(self.outcome)


@dataclass(frozen=True)
class NeedsAttention:
    """Out of contact, failed, diverged, without an applied step, or queued for no worker."""

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        is_bad = Run.status.in_((Status.UNREACHABLE, Status.FAILED))
        return is_bad | has_outcome("diverged") | has_outcome("no_updates") | is_infeasible()


@dataclass(frozen=True)
class Created:
    """Created before or since a time, given absolutely or as seconds ago."""

    is_before: bool
    moment: float | None = None
    seconds_ago: float = 0.0

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        if self.moment is not None:
            moment: ColumnElement[float] = literal(self.moment)
        else:  # a subquery: PostgreSQL uses no index for a volatile clock
            moment = select(now() - self.seconds_ago).scalar_subquery()
        return Run.created_at < moment if self.is_before else Run.created_at >= moment


@dataclass(frozen=True)
class Text:
    """A comparison of one of TEXTS with a text."""

    name: str
    text: str

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        column, text = func.lower(TEXTS[self.name]), self.text.lower()
        if self.name == "name":
            return column.contains(text, autoescape=True)
        if self.name == "tag":
            listed = "," + func.replace(column, ", ", ",") + ","
            return listed.contains(f",{text},", autoescape=True)
        if self.name == "owner":
            return Run.owner_id.in_(select(User.id).where(column == text))
        return column == text


@dataclass(frozen=True)
class InSweep:
    """A trial of a sweep, or of any sweep without a sweep_id."""

    sweep_id: int | None = None

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        trials = select(Trial.run_id)
        if self.sweep_id is not None:
            trials = trials.where(Trial.sweep_id == self.sweep_id)
        return Run.id.in_(trials)


@dataclass(frozen=True)
class Has:
    """Presence of one of TEXTS, a setting or a metric, with any value."""

    name: str

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        if self.name in TEXTS and self.name != "owner":
            return TEXTS[self.name] != ""
        settings = select(RunConfigValue.run_id).where(_settings_called(self.name))
        metrics = select(LatestMetric.run_id).where(is_metric(self.name))
        return Run.id.in_(union_all(settings, metrics))


@dataclass(frozen=True)
class Compared:
    """A comparison of a named number or, if the text is not a number, of a setting."""

    name: str
    sign: str  # one of COMPARISONS. A text that is not a number is compared for equality.
    value: float | None
    text: str

    def sql(self) -> ColumnElement[bool]:
        """Return the condition, false for unknown values."""
        compare, value = COMPARISONS[self.sign], literal(self.value, Double[float]())
        if self.name in NUMBERS:
            return func.coalesce(compare(NUMBERS[self.name], value), false())
        called = _settings_called(self.name)
        if self.value is None:
            is_so = func.lower(RunConfigValue.text) == self.text.lower()
            return Run.id.in_(select(RunConfigValue.run_id).where(called, is_so))
        settings = select(RunConfigValue.run_id).where(
            called, compare(RunConfigValue.number, value)
        )
        metrics = select(LatestMetric.run_id).where(
            is_metric(self.name), compare(LatestMetric.value, value)
        )
        return Run.id.in_(union_all(settings, metrics))


Condition: TypeAlias = (
    Word | InStatus | EndedAs | NeedsAttention | Created | Text | InSweep | Has | Compared
)


@dataclass(frozen=True)
class Term:
    """A condition or its negation."""

    condition: Condition
    is_negated: bool = False

    def sql(self) -> ColumnElement[bool]:
        """Return the condition."""
        condition = self.condition.sql()
        return not_(condition) if self.is_negated else condition


Filter: TypeAlias = Sequence[Term]

#: "active": neither ended nor paused by a user.  "ended": all ended statuses.
STATUS_GROUPS = MappingProxyType({"active": (Status.QUEUED, *ACTIVE), "ended": ENDED})

_ROW = func.lower(
    Run.name.concat("\n")
    .concat(Run.recipe)
    .concat("\n")
    .concat(Run.precision)
    .concat("\n")
    .concat(Run.tags)
    .concat("\n")
    .concat(Run.project)
)


def is_metric(name: str) -> ColumnElement[bool]:
    """Return the condition that a latest point belongs to a metric of this name."""
    return LatestMetric.name.in_(_metric_names(name))


def qualify(name: str, prefix: str) -> str:
    """Return the name of a metric or setting as used in filters and sort orders.

    prefix: METRICS or SETTINGS.
    """
    return prefix + name if name in TAKEN else name


def _metric_names(name: str) -> list[str]:
    return list(dict.fromkeys((name, name.removeprefix(METRICS))))


def _settings_called(name: str) -> ColumnElement[bool]:
    paths, names = _paths(name), _parts(name)[1]
    is_named = RunConfigValue.name.in_(names)
    return is_named & RunConfigValue.path.in_(paths) if paths else is_named


def _paths(name: str) -> list[str]:
    """Return the paths that a name refers to; empty for any path that ends in it."""
    prefix, names = _parts(name)
    if prefix in ("", SETTINGS):
        return []
    prefixes = dict.fromkeys((prefix, prefix.removeprefix(SETTINGS)))
    return [start + last for start in prefixes for last in names]


def _parts(name: str) -> tuple[str, list[str]]:
    """Return the prefix before the last part of a name, and the candidates for that part."""
    last = name.rpartition(".")[2]
    return name.removesuffix(last), [
        candidate for candidate in (last, SHORT_NAMES.get(last)) if candidate
    ]


@dataclass(frozen=True)
class Order:
    """Sort order of runs, with ties sorted by id and missing values last."""

    keys: tuple[ColumnElement[Any], ...]  # sort keys
    falls: bool  # descending
    # Further tables that the keys need, each with its join condition; runs and users are always
    # there.
    joined: tuple[tuple[Any, ColumnElement[bool]], ...] = ()

    @classmethod
    def of(cls, session: Session, sort: str) -> "Order":
        """Return the order by a column, setting or metric; a "-" prefix means descending."""
        name, falls = sort.removeprefix("-"), sort.startswith("-")
        name = SYNONYMS.get(name, name)
        last = -math.inf if falls else math.inf
        if name == "id":
            return cls((Run.id.expression,), falls)
        if name == "owner":
            return cls((User.name.expression, Run.id.expression), falls, _OWNER)
        if name == "duration":  # at one fixed time, or a training run could repeat on a later page
            seconds = func.coalesce(seconds_until(clock.current(session)), last)
            return cls((seconds, Run.id.expression), falls)
        if name in NUMBERS:
            return _order_by_number(name, falls=falls)
        if name in ORDERS:
            return cls((ORDERS[name], Run.id.expression), falls)
        metrics = tuple(metric for metric in _metric_names(name) if is_logged(session, metric))
        return _order_by_name(tuple(paths_of(session, name)), metrics, falls=falls)

    def join_to(self, query: Select[Any]) -> Select[Any]:
        """Return a query of runs with the joins that this order needs."""
        for table, on in self.joined:
            query = query.outerjoin(table, on)
            if inspect(table).mapper.class_ is RunConfigValue:
                # With the index of a run's settings SQLite would do two look-ups for each run.
                query = query.with_hint(table, f"INDEXED BY {_BY_NAME}", "sqlite")
        return query


@cache
def _order_by_number(name: str, *, falls: bool) -> Order:
    last = -math.inf if falls else math.inf
    return Order((func.coalesce(NUMBERS[name], last), Run.id.expression), falls)


@lru_cache(MOST_KEPT)
def _order_by_name(paths: tuple[str, ...], metrics: tuple[str, ...], *, falls: bool) -> Order:
    joined = _settings_at(paths)
    numbers = [setting.number for setting, _on in joined]
    texts = [setting.text for setting, _on in joined]
    for name in metrics:
        metric = aliased(LatestMetric)
        joined.append((metric, and_(metric.run_id == Run.id, metric.name == name)))
        numbers.append(metric.value)
    if not joined:  # unknown name: the default order
        return Order((Run.id.expression,), True)
    last = -math.inf if falls else math.inf
    keys = (func.coalesce(*numbers, last), func.coalesce(*texts, "", ""), Run.id.expression)
    return Order(keys, falls, tuple(joined))


_OWNER = ((User, User.id == Run.owner_id),)
_BY_NAME = "sqlite_autoindex_run_config_values_1"  # SQLite's name for the primary key


def _settings_at(paths: Sequence[str]) -> list[tuple[Any, ColumnElement[bool]]]:
    joins: list[tuple[object, ColumnElement[bool]]] = []
    for path in paths:
        setting = aliased(RunConfigValue)
        called = (setting.name == path.rpartition(".")[2]) & (setting.path == path)
        joins.append((setting, called & (setting.run_id == Run.id)))
    return joins


@lru_cache(MOST_KEPT)
def named_at_all(name: str) -> Select[bool]:
    """Select whether any run has a setting or a metric of this name."""
    setting = select(RunConfigValue.run_id).where(_settings_called(name)).limit(1)
    metric = select(LatestMetric.run_id).where(is_metric(name)).limit(1)
    return select(setting.exists() | metric.exists())


def paths_of(session: Session, name: str) -> list[str]:
    """Return the first few paths of the settings that a name refers to."""
    names = _parts(name)[1]
    queries = [(_PATH, path) for path in _paths(name)] or [
        (_PATHS, candidate) for candidate in names
    ]
    paths = [
        path
        for query, at in queries
        for path in session.scalars(query, {"called": at.rpartition(".")[2], "at": at})
    ]
    return sorted(paths)[:MOST_PATHS]


def is_logged(session: Session, name: str) -> bool:
    """Return whether any run has a metric of exactly this name."""
    return bool(session.scalar(_IS_LOGGED, {"called": name}))


def distinct(column: object, *conditions: ColumnElement[bool]) -> Select[Any]:
    """Select the distinct values of an indexed column by one search per value.

    DISTINCT would read the whole index on both databases.
    """
    least = func.min(column)
    values = select(least.label("value")).where(*conditions).cte("found", recursive=True)
    after = select(least).where(column > values.c.value, *conditions).scalar_subquery()
    values = values.union_all(select(after).where(values.c.value.is_not(None)))
    return select(values.c.value).where(values.c.value.is_not(None))


_IS_CALLED = RunConfigValue.name == bindparam("called")
_PATHS = distinct(RunConfigValue.path, _IS_CALLED).limit(MOST_PATHS)
_PATH = (
    select(RunConfigValue.path).where(_IS_CALLED, RunConfigValue.path == bindparam("at")).limit(1)
)
_IS_LOGGED = select(
    select(LatestMetric.run_id).where(LatestMetric.name == bindparam("called")).exists()
)


def values_of(session: Session, run_ids: Sequence[int], name: str) -> dict[int, float | str | None]:
    """Return each run's setting of a name, or else the latest value of the metric."""
    metrics = select(LatestMetric.run_id, LatestMetric.value).where(
        LatestMetric.run_id.in_(run_ids), is_metric(name)
    )
    values: dict[int, float | str | None] = {
        run_id: math.nan if value is None else value  # the database has NaN as NULL
        for run_id, value in session.execute(metrics)
    }
    settings = select(RunConfigValue.run_id, RunConfigValue.number, RunConfigValue.text)
    settings = settings.where(_settings_called(name), RunConfigValue.run_id.in_(run_ids))
    for run_id, number, text in session.execute(settings.order_by(RunConfigValue.path.desc())):
        values[run_id] = number if text is None else text
    return values
