"""Evaluation of alert rules: opens one alert per rule and run, and resolves it.

An evaluation reads only runs that changed since this server's last one, and writes only changes. If
two servers evaluate at once, one of them writes: each write increments the turn that it began at,
and an evaluation that finds it incremented is dropped. As a second guard, unique indexes allow one
open alert per rule and run, or subject of the service. Rules on the service are evaluated every
TIMED_SECONDS.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import CompoundSelect, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import clock
from db.access import permissions
from db.alerts import alert_facts
from db.alerts.alert_conditions import CONDITIONS, TIMED, describe
from db.alerts.rules import ALL, MINE, RUN, SERVICE
from db.alerts.service_conditions import SERVICE_CONDITIONS, Service, host
from db.database import Database
from db.health import findings
from db.health.scaling_health import has_scaler
from db.tables import (
    ACTIVE,
    NOT_DELETED,
    Alert,
    AlertEvaluation,
    AlertRule,
    Channel,
    Delivery,
    Run,
    Status,
)
from halfstep.telemetry.plain_json import json_safe

#: Runs per evaluation; the next one reads the others, which it has not marked as seen.
MOST_RUNS = 500
#: Alerts per evaluation: SQLite has one writer, which other transactions must not wait for long.
MAX_ALERTS = 200
#: How far an evaluation goes back, since a late commit may have an earlier end time.
OVERLAP_SECONDS = 60.0
#: Interval at which an evaluation's time is recorded: a server that starts continues from there.
NOTED_SECONDS = 60.0
#: Interval at which unchanged runs are evaluated, if a rule needs it.
TIMED_SECONDS = 15.0
TEXT_CHARACTERS = 500
#: Statuses of evaluated runs that have not ended: no condition applies to queued ones.
EVALUATED = (*ACTIVE, Status.PAUSED)


@dataclass
class Seen:
    """The state of a server's evaluations: by run, its mark at the last one."""

    folder: Path = Path()  # the server's data folder
    since: float | None = None
    rules: Any = None
    marks: dict[int, Any] = field(default_factory=dict)
    service_at: float = -math.inf  # of the last evaluation of rules on the service


class _New(NamedTuple):
    """A new alert of a run, or of a subject of the service."""

    rule: AlertRule
    run: Run | None
    subject: str
    text: str


@dataclass
class _Result:
    """The result of an evaluation: new alerts, and alerts to resolve."""

    turn: int
    moment: float
    since: float
    is_due: bool
    has_service: bool = False
    new: list[_New] = field(default_factory=list)
    resolved: list[int] = field(default_factory=list)
    marks: dict[int, Any] = field(default_factory=dict)


def evaluate(database: Database, seen: Seen, address: str) -> int:
    """Evaluate the rules once; return the number of new alerts. address: of the server, for links.

    Does nothing if another server wrote in the meantime.
    """
    with database.reading() as session:
        result = _evaluate(session, seen)
    if result is None:
        return 0
    created = 0
    if result.new or result.resolved or result.is_due:
        with database.writing() as session:
            if not _take_turn(session, result):
                return 0  # the next evaluation reads what the other server has written
            created = _write(session, result, address)
    seen.since = result.since
    seen.marks = result.marks
    if result.has_service:
        seen.service_at = result.moment
    return created


def _evaluate(session: Session, seen: Seen) -> _Result | None:
    rules = list(session.scalars(select(AlertRule).where(AlertRule.is_on).order_by(AlertRule.id)))
    moment = clock.current(session)
    if not rules:
        seen.since, seen.marks = moment, {}
        return None
    if is_new_rule := (ids := [rule.id for rule in rules]) != seen.rules:
        seen.rules, seen.marks = ids, {}  # a new rule may be true for unchanged runs
    last = session.get(AlertEvaluation, 1)
    if seen.since is None:
        seen.since = last.evaluated_at if last else moment
    result = _Result(last.turn if last else 0, moment, moment, False)
    matching: dict[int, list[AlertRule]] = {}
    visible = permissions.seen_by(session, {rule.user_id for rule in rules})
    concerning = _Concerning([rule for rule in rules if rule.scope != SERVICE], visible)
    for row in session.execute(_lately(seen.since - OVERLAP_SECONDS)):
        mine = concerning(row)
        is_timed = row.status in ACTIVE and any(rule.condition == TIMED for rule in mine)
        mark = (row.revision, moment // TIMED_SECONDS if is_timed else 0)
        if mine and seen.marks.get(row.id) != mark:
            if len(matching) == MOST_RUNS:
                result.since = seen.since
                continue
            matching[row.id] = mine
        result.marks[row.id] = mark
    result.is_due = last is None or result.since - last.evaluated_at > NOTED_SECONDS
    if matching:
        _apply_conditions(session, matching, result, seen.since)
    of_service = [rule for rule in rules if rule.scope == SERVICE]
    if of_service and (is_new_rule or moment - seen.service_at >= TIMED_SECONDS):
        result.has_service = True
        service = Service(session, moment, seen.folder)
        for rule in of_service:
            if visible.get(rule.user_id, ()) is None:  # an admin's
                _apply_to_service(service, rule, result)
    return result


def _apply_to_service(service: Service, rule: AlertRule, result: _Result) -> None:
    condition = SERVICE_CONDITIONS[rule.condition]
    found = condition.find(rule, service)
    opened = select(Alert.subject, Alert.id)
    opened = opened.where(Alert.rule_id == rule.id, Alert.resolved_at.is_(None))
    known = {row.subject: row.id for row in service.session.execute(opened)}
    for subject, text in found.items():
        if subject not in known and len(result.new) < MAX_ALERTS:
            result.new.append(_New(rule, None, subject, f"{text}."))
    result.resolved += [
        key
        for subject, key in known.items()
        if subject not in found and (not condition.is_of_server or subject == host())
    ]


def _lately(since: float) -> CompoundSelect[int, int, int, str, Status]:
    """Return the query of runs that train, or have ended since; each half uses an index."""
    columns = (Run.id, Run.revision, Run.owner_id, Run.project, Run.status)
    training = select(*columns).where(Run.status.in_(EVALUATED), NOT_DELETED)
    return training.union_all(select(*columns).where(Run.ended_at > since, NOT_DELETED))


class _Concerning:
    """The rules that apply to a run, computed once per owner and project.

    seen: for each user, the visible projects; None: all.
    """

    def __init__(self, rules: list[AlertRule], seen: Mapping[int, Collection[str] | None]) -> None:
        self._seen = seen
        self._wide = [rule for rule in rules if rule.scope != RUN]
        self._of_run: dict[int | None, list[AlertRule]] = {}
        for rule in rules:
            if rule.scope == RUN:
                self._of_run.setdefault(rule.run_id, []).append(rule)
        self._known: dict[tuple[int, str], list[AlertRule]] = {}

    def __call__(self, row: Any) -> list[AlertRule]:
        key = (row.owner_id, row.project)
        if key not in self._known:
            wide = [rule for rule in self._wide if _concerns(rule, *key)]
            self._known[key] = [rule for rule in wide if self._sees(rule, row.project)]
        wide, own = self._known[key], self._of_run.get(row.id, ())
        return [*wide, *(rule for rule in own if self._sees(rule, row.project))] if own else wide

    def _sees(self, rule: AlertRule, project: str) -> bool:
        projects = self._seen.get(rule.user_id, ())
        return projects is None or project in projects


def _apply_conditions(
    session: Session, matching: dict[int, list[AlertRule]], result: _Result, since: float
) -> None:
    some_runs = list(session.scalars(select(Run).where(Run.id.in_(matching))))
    needs: set[str] = set()
    for mine in matching.values():
        needs.update(*(CONDITIONS[rule.condition].needs for rule in mine))
    columns = (Alert.rule_id, Alert.run_id, Alert.id)
    opened = select(*columns).where(Alert.run_id.in_(matching), Alert.resolved_at.is_(None))
    known = {(rule_id, run_id): key for rule_id, run_id, key in session.execute(opened)}
    causes: dict[int, str] = {}  # phrases, by run
    for facts in alert_facts.read(session, some_runs, needs, result.moment):
        if len(result.new) >= MAX_ALERTS:
            result.since = since
            del result.marks[facts.run.id]
            continue
        for rule in matching[facts.run.id]:
            description, key = describe(rule, facts), known.get((rule.id, facts.run.id))
            if description is not None and key is None:
                if CONDITIONS[rule.condition].has_cause:
                    if facts.run.id not in causes:
                        causes[facts.run.id] = findings.certain_cause(session, facts.run)
                    description += causes[facts.run.id]
                text = f"Run {facts.run.id}, {facts.run.name}, {description}."
                result.new.append(_New(rule, facts.run, "", text))
            elif description is None and key is not None:
                result.resolved.append(key)


def _concerns(rule: AlertRule, owner_id: int, project: str) -> bool:
    if rule.scope == MINE:
        return owner_id == rule.user_id
    return rule.scope == ALL or project == rule.project


def _take_turn(session: Session, result: _Result) -> bool:
    first = _insert(session, AlertEvaluation).values(id=1, turn=0, evaluated_at=result.since)
    session.execute(first.on_conflict_do_nothing())
    mine = (AlertEvaluation.id == 1, AlertEvaluation.turn == result.turn)
    taken = (
        update(AlertEvaluation).where(*mine).values(turn=result.turn + 1, evaluated_at=result.since)
    )
    return session.scalar(taken.returning(AlertEvaluation.id)) is not None


def _write(session: Session, result: _Result, address: str) -> int:
    if result.resolved:
        alerts = update(Alert).where(Alert.id.in_(result.resolved))
        session.execute(alerts.values(resolved_at=result.moment))
    new_ids = {new.rule.id for new in result.new}
    # Rules that were deleted or switched off in the meantime create no alerts.
    enabled = select(AlertRule.id).where(AlertRule.id.in_(new_ids), AlertRule.is_on)
    rule_ids = set(session.scalars(enabled.with_for_update(read=True)))
    query = (
        select(Channel)
        .where(Channel.is_on, Channel.user_id.in_({new.rule.user_id for new in result.new}))
        .with_for_update(read=True)
    )
    channels = {channel.id: channel for channel in session.scalars(query)} if new_ids else {}
    rows, bodies = [], {}
    for new in result.new:
        rule, run_id = new.rule, new.run.id if new.run else None
        if rule.id in rule_ids:
            content = _content(new, result.moment, address)
            row: dict[str, Any] = {"user_id": rule.user_id, "rule_id": rule.id, "run_id": run_id}
            row |= {"subject": new.subject, "text": content["text"], "content": content}
            row |= {"condition": rule.condition, "created_at": result.moment}
            rows.append(row)
            bodies[rule.id, run_id, new.subject] = (rule, json.dumps(content))
    if not rows:
        return 0
    inserted = _insert(session, Alert).values(rows).on_conflict_do_nothing()
    inserted = inserted.returning(Alert.id, Alert.rule_id, Alert.run_id, Alert.subject)
    made = session.execute(inserted).all()
    for alert_id, rule_id, run_id, subject in made:
        rule, body = bodies[rule_id, run_id, subject]
        for channel_id in rule.channel_ids:
            channel = channels.get(channel_id)
            if channel is not None and channel.user_id == rule.user_id:
                alert = {"user_id": rule.user_id, "alert_id": alert_id, "run_id": run_id}
                session.add(Delivery(channel_id=channel_id, body=body, **alert))
    session.flush()
    return len(made)


def _content(new: _New, moment: float, address: str) -> dict[str, Any]:
    """Return the payload for channels; docs/how-to/alerts.md describes it."""
    rule, run = new.rule, new.run
    content = {
        "event": "alert",
        "condition": rule.condition,
        "text": new.text[:TEXT_CHARACTERS],
        "value": rule.value,
        "metric": rule.metric or None,
        "rule_id": rule.id,
        "time": moment,
    }
    if run is None:
        url = f"{address}/{SERVICE_CONDITIONS[rule.condition].page}"
        return content | {"subject": new.subject, "url": url}
    return content | {
        "run": {
            "id": run.id,
            "name": run.name,
            "project": run.project,
            "status": run.status,
            "step": run.step,
            "loss": json_safe(run.known_loss),
            "scale": json_safe(run.scale) if has_scaler(run) else None,
            "url": f"{address}/runs/{run.id}",
        }
    }


def _insert(session: Session, table: object) -> Any:
    dialect: Any = sqlite if session.connection().dialect.name == "sqlite" else postgresql
    return dialect.insert(table)
