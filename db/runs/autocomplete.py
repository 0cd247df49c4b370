"""Completions for run filters: existing names and values, in bounded numbers."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.names import natural_key
from db.runs.run_filters import METRICS, SETTINGS, named_at_all, qualify
from db.tables import NOT_DELETED, LatestMetric, Run, RunConfigValue, User

MOST_NAMES, MOST_VALUES, NEWEST_RUNS = 500, 200, 2000
#: Runs and rows that are read for the names of settings and metrics.
NAMED_RUNS, MOST_ROWS = 500, 20_000


@dataclass(frozen=True)
class Vocabulary:
    """Names and values for completion, in order."""

    tags: list[str]
    recipes: list[str]
    owners: list[str]
    projects: list[str]
    # The last parts of their paths; if several paths share one, also the first and the last of
    # these paths.
    settings: list[str]
    metrics: list[str]


def vocabulary(session: Session) -> Vocabulary:
    """Return completions from the newest runs that the session's user can see."""
    newest = select(Run.id, Run.tags, Run.recipe, Run.project, User.name.label("owner")).where(
        NOT_DELETED
    )
    newest = newest.join(User, User.id == Run.owner_id)
    rows = session.execute(newest.order_by(Run.id.desc()).limit(NEWEST_RUNS)).all()
    run_ids = [row.id for row in rows[:NAMED_RUNS]]
    tags = {tag.strip() for row in rows for tag in row.tags.split(",")}
    return Vocabulary(
        tags=_some(tags),
        recipes=_some({row.recipe for row in rows}),
        owners=_some({row.owner for row in rows}),
        projects=_some({row.project for row in rows}),
        settings=list(_settings(session, run_ids)),
        metrics=list(_metrics(session, run_ids)),
    )


def find_unknown(session: Session, names: Collection[str]) -> list[str]:
    """Return the names that no setting and no metric of any run has."""
    return [name for name in dict.fromkeys(names) if not session.scalar(named_at_all(name))]


def _some(values: Collection[str]) -> list[str]:
    return sorted(filter(None, values))[:MOST_VALUES]


def _settings(session: Session, run_ids: Collection[int]) -> Iterator[str]:
    """Yield each setting's name, and the first and last path if several share it."""
    newest = select(RunConfigValue.name, RunConfigValue.path).where(
        RunConfigValue.run_id.in_(run_ids)
    )
    rows = newest.order_by(RunConfigValue.run_id.desc()).limit(MOST_ROWS).subquery()
    paths = (func.min(rows.c.path), func.max(rows.c.path))
    query = select(rows.c.name, *paths).group_by(rows.c.name).order_by(rows.c.name)
    for name, first, last in session.execute(query.limit(MOST_NAMES)):
        yield qualify(name, SETTINGS)
        if first != last:
            yield from (qualify(path, SETTINGS) for path in (first, last))


def _metrics(session: Session, run_ids: Collection[int]) -> Sequence[str]:
    """Return the metric names, qualified as in filters and sort orders."""
    newest = select(LatestMetric.name).where(LatestMetric.run_id.in_(run_ids))
    rows = newest.order_by(LatestMetric.run_id.desc()).limit(MOST_ROWS).subquery()
    query = select(rows.c.name).distinct().order_by(rows.c.name).limit(MOST_NAMES)
    return [qualify(name, METRICS) for name in sorted(session.scalars(query), key=natural_key)]
