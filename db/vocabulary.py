"""The words that a filter of runs can be completed with: what there is, a bounded part of it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.conditions import distinct, named_at_all
from db.tables import KEPT, LatestMetric, Run, RunSetting, User

MOST_NAMES, MOST_VALUES, NEWEST_RUNS = 500, 200, 2000


@dataclass(frozen=True)
class Vocabulary:
    """Names and values, in order. settings: by the last parts of their paths; where several have
    the same, by the first and the last path too.
    """

    tags: list[str]
    recipes: list[str]
    owners: list[str]
    projects: list[str]
    settings: list[str]
    metrics: list[str]


def vocabulary(session: Session) -> Vocabulary:
    """Return the words of the newest runs, and the names of settings and metrics of all."""
    newest = select(Run.tags, Run.recipe, Run.project).where(KEPT)
    newest = newest.order_by(Run.id.desc()).limit(NEWEST_RUNS)
    rows = session.execute(newest).all()
    owners = select(User.name).order_by(User.name).limit(MOST_VALUES)
    tags = {tag.strip() for row in rows for tag in row.tags.split(",")}
    return Vocabulary(
        tags=_some(tags),
        recipes=_some({row.recipe for row in rows}),
        owners=list(session.scalars(owners)),
        projects=_some({row.project for row in rows}),
        settings=list(_settings(session)),
        metrics=list(session.scalars(distinct(LatestMetric.name).limit(MOST_NAMES))),
    )


def unknown(session: Session, names: Collection[str]) -> list[str]:
    """Return those names that no setting and no metric of any run has."""
    return [name for name in dict.fromkeys(names) if not session.scalar(named_at_all(name))]


def _some(values: Collection[str]) -> list[str]:
    return sorted(filter(None, values))[:MOST_VALUES]


def _settings(session: Session) -> Iterator[str]:
    """Yield each setting by its name, and where several have it by their paths too."""
    names = distinct(RunSetting.name).limit(MOST_NAMES).subquery()
    ends = [
        select(end(RunSetting.path)).where(RunSetting.name == names.c.value).scalar_subquery()
        for end in (func.min, func.max)
    ]
    for name, first, last in session.execute(select(names.c.value, *ends)):
        yield name
        if first != last:
            yield from (first, last)
