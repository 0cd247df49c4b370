"""Diagnoses of a run, decoded into the events that they store."""

import logging
from functools import cache
from typing import TypeVar

import msgspec
from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from db.tables import Diagnosis, Run
from halfstep.telemetry.events import StepEvent
from halfstep.telemetry.plain_json import JsonObject

E = TypeVar("E", bound=StepEvent)
_LOG = logging.getLogger(__name__)


class StoredEvents:
    """Stored events of one run, of which few kinds exist.

    They are read without the session's limits, so the run itself is required: a session returns
    only runs that its user may see.
    """

    def __init__(self, session: Session, run: Run) -> None:
        self._session, self._run_id = session, run.id
        # One index search for each kind.
        rows = session.connection().execute(_kinds_query(), {"run_id": run.id})
        self._kinds = frozenset(rows.scalars())

    def newest(self, kind: type[E]) -> E | None:
        """Return the event of a kind with the highest step; None if there is none."""
        return next(iter(self.latest(kind, most=1)), None)

    def latest(self, kind: type[E], *, most: int) -> list[E]:
        """Return the latest events of a kind, the latest first."""
        return self._read(kind, _latest_query(), most=most)

    def first(self, kind: type[E], *, most: int) -> list[E]:
        """Return the first events of a kind, in order of step."""
        return self._read(kind, _first_query(), most=most)

    def of_step(self, kind: type[E], step: int) -> E | None:
        """Return the event of a kind that belongs to a step; None if there is none."""
        return next(iter(self._read(kind, _of_step_query(), step=step)), None)

    def _read(self, kind: type[E], query: Select[JsonObject], **given: int) -> list[E]:
        """Return the events, without those that this version cannot read, which are logged."""
        tag = str(kind.__struct_config__.tag)
        if tag not in self._kinds:
            return []
        events: list[E] = []
        rows = self._session.connection().execute(
            query, {"run_id": self._run_id, "kind": tag, **given}
        )
        for content in rows.scalars():
            try:
                events.append(msgspec.convert(content, kind))
            except msgspec.ValidationError as error:
                _LOG.warning("A stored event is left out: %s: %s", tag, error)
        return events


def _of_kind() -> Select[JsonObject]:
    mine = (Diagnosis.run_id == bindparam("run_id"), Diagnosis.kind == bindparam("kind"))
    return select(Diagnosis.content).where(*mine)


@cache
def _latest_query() -> Select[JsonObject]:
    return _of_kind().order_by(Diagnosis.step.desc()).limit(bindparam("most"))


@cache
def _first_query() -> Select[JsonObject]:
    return _of_kind().order_by(Diagnosis.step).limit(bindparam("most"))


@cache
def _of_step_query() -> Select[JsonObject]:
    return _of_kind().where(Diagnosis.step == bindparam("step"))


@cache
def _kinds_query() -> Select[str]:
    mine = Diagnosis.run_id == bindparam("run_id")
    found = select(func.min(Diagnosis.kind).label("kind")).where(mine).cte("kinds", recursive=True)
    following = select(func.min(Diagnosis.kind)).where(mine, Diagnosis.kind > found.c.kind)
    found = found.union_all(select(following.scalar_subquery()).where(found.c.kind.is_not(None)))
    return select(found.c.kind).where(found.c.kind.is_not(None))
