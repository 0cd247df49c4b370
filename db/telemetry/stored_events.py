"""Diagnoses of a run, decoded into the events that they store."""

import logging
from typing import TypeVar

import msgspec
from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from db.tables import Diagnosis
from halfstep.telemetry.events import StepEvent
from halfstep.telemetry.plain_json import JsonObject

E = TypeVar("E", bound=StepEvent)
_LOG = logging.getLogger(__name__)


def newest(session: Session, run_id: int, kind: type[E]) -> E | None:
    """Return the event of a kind with the highest step; None if there is none."""
    return next(iter(several(session, run_id, kind, most=1)), None)


def several(session: Session, run_id: int, kind: type[E], *, most: int) -> list[E]:
    """Return the latest events of a kind, the latest first."""
    query = _contents(run_id, kind).order_by(Diagnosis.step.desc()).limit(most)
    return _decoded(session, query, kind)


def first(session: Session, run_id: int, kind: type[E], *, most: int) -> list[E]:
    """Return the first events of a kind, in order of step."""
    query = _contents(run_id, kind).order_by(Diagnosis.step).limit(most)
    return _decoded(session, query, kind)


def _contents(run_id: int, kind: type[StepEvent]) -> Select[JsonObject]:
    tag = str(kind.__struct_config__.tag)
    return select(Diagnosis.content).where(Diagnosis.run_id == run_id, Diagnosis.kind == tag)


def _decoded(session: Session, query: Select[JsonObject], kind: type[E]) -> list[E]:
    """Return the events, without those that this version cannot read, which are logged."""
    events: list[E] = []
    for content in session.scalars(query):
        try:
            events.append(msgspec.convert(content, kind))
        except msgspec.ValidationError as error:
            _LOG.warning("A stored event is left out: %s: %s", kind.__name__, error)
    return events
