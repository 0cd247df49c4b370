"""Alert rules; `db.alerts.alert_evaluation` evaluates them."""

import math
from collections.abc import Collection
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from db.access import permissions
from db.access.permissions import Permission
from db.alerts import channels
from db.alerts.alert_conditions import CONDITIONS, Condition
from db.alerts.service_conditions import SERVICE_CONDITIONS, ServiceCondition
from db.errors import Invalid, NotFound
from db.tables import ENDED, Alert, AlertRule, Run, User
from halfstep.number_formats import number

RUN, PROJECT, MINE, ALL, SERVICE = SCOPES = ("run", "project", "mine", "all", "service")
#: Limit per user.
MOST = 100
NAME_CHARACTERS = 200
#: By name: of runs, and of the service.
ALL_CONDITIONS: dict[str, Condition | ServiceCondition] = {**CONDITIONS, **SERVICE_CONDITIONS}
LARGEST_VALUE = 1e300
#: Meanings of values that are at least 1.
FROM_ONE = ("steps", "minutes", "hours", "GB")


def rules(session: Session, user: User) -> list[AlertRule]:
    """List a user's rules, newest first."""
    query = select(AlertRule).where(AlertRule.user_id == user.id)
    return list(session.scalars(query.order_by(AlertRule.id.desc()).limit(MOST)))


def make(
    session: Session,
    user: User,
    *,
    condition: str,
    scope: str,
    value: float | None = None,
    metric: str = "",
    run_id: int | None = None,
    project: str = "",
    channel_ids: Collection[int] | None = None,
) -> AlertRule:
    """Create a rule, or return an existing identical one, switched on.

    scope: "" is the service's for its conditions, else the user's runs.  channel_ids: by default
    all of the user's channels that are on. Raises Invalid.
    """
    mine = [channel.id for channel in channels.list_channels(session, user) if channel.is_on]
    if channel_ids is not None:
        mine = _check_channels(session, user, channel_ids)
    metric, project = metric.strip(), project.strip()
    scope = scope or (SERVICE if condition in SERVICE_CONDITIONS else MINE)
    wrong = _mistakes(condition, scope, value, metric, project)
    if scope == SERVICE and not _is_operator(session, user):
        wrong["scope"] = "service is only for admins; allowed: run, project, mine or all"
    run = session.get(Run, run_id) if scope == RUN and run_id is not None else None
    if scope == RUN and (run is None or run.deleted_at is not None):
        wrong["run_id"] = f"there is no run {run_id}; allowed: the number of a run"
    elif run is not None and run.status in ENDED:
        text = f"run {run_id} is already {run.status}; allowed: a run that has not ended"
        wrong["run_id"] = f"{text}. Continue the run first"
    grants = permissions.limits(session)
    if scope == PROJECT and grants is not None and not grants.may(Permission.VIEW_RUN, project):
        text = f"there is no project {project[:100]!r}; allowed: a project that you may view"
        wrong.setdefault("project", text)
    if wrong:
        raise Invalid(wrong)
    fields: dict[str, Any] = {
        "condition": condition,
        "value": value if ALL_CONDITIONS[condition].value else None,
        "metric": metric if ALL_CONDITIONS[condition].has_metric else "",
        "scope": scope,
        "run_id": run.id if run else None,
        "project": project if scope == PROJECT else "",
    }
    # Concurrent requests of a user are serialized, for the limit and the duplicate check.
    session.execute(select(User.id).where(User.id == user.id).with_for_update(key_share=True))
    same = select(AlertRule).filter_by(user_id=user.id, **fields).with_for_update()
    if (known := session.scalars(same).first()) is not None:
        known.channel_ids, known.is_on = mine, True
        return known
    count = select(func.count(AlertRule.id)).where(AlertRule.user_id == user.id)
    if (session.scalar(count) or 0) >= MOST:
        raise Invalid({"condition": f"you have {MOST} rules, the maximum; delete some first"})
    rule = AlertRule(user_id=user.id, channel_ids=mine, **fields)
    session.add(rule)
    session.flush()
    return rule


def switch(session: Session, user: User, rule_id: int, *, is_on: bool) -> AlertRule:
    """Enable or disable a rule. An enabled rule is evaluated from then on."""
    rule = _mine(session, user, rule_id)
    rule.is_on = is_on
    return rule


def delete(session: Session, user: User, rule_id: int) -> None:
    """Delete a rule; its alerts stay. Raises NotFound."""
    rule = _mine(session, user, rule_id)
    session.execute(update(Alert).where(Alert.rule_id == rule_id).values(rule_id=None))
    session.delete(rule)
    session.flush()


def describe(rule: AlertRule) -> str:
    """Describe a rule in words that follow "Notify me when"."""
    value = "" if rule.value is None else number(rule.value)
    if rule.scope == SERVICE:
        return SERVICE_CONDITIONS[rule.condition].label.replace("so many", value)
    condition = CONDITIONS[rule.condition]
    of = {
        RUN: f"run {rule.run_id}",
        PROJECT: f"a run of {rule.project}",
        MINE: "a run of mine",
        ALL: "any run",
    }[rule.scope]
    words = condition.label.replace("a metric", rule.metric) if rule.metric else condition.label
    if "so many" in words:
        return f"{of} {words.replace('so many', value)}"
    return f"{of} {words} {value}".rstrip()


def _mine(session: Session, user: User, rule_id: int) -> AlertRule:
    rule = session.get(AlertRule, rule_id, with_for_update=True)
    if rule is None or rule.user_id != user.id:
        raise NotFound(f"You have no rule {rule_id}.")
    return rule


def _is_operator(session: Session, user: User) -> bool:
    """Return whether a user sees all of the service, and this session is not limited."""
    grants = permissions.limits(session)
    return user.is_admin and (grants is None or grants.projects is None)


def _check_channels(session: Session, user: User, channel_ids: Collection[int]) -> list[int]:
    known = {channel.id for channel in channels.list_channels(session, user)}
    if unknown := sorted(set(channel_ids) - known):
        raise Invalid({"channel_ids": f"you have no channel {unknown[0]}; allowed: your own"})
    return sorted(set(channel_ids))


def _mistakes(
    condition: str, scope: str, value: float | None, metric: str, project: str
) -> dict[str, str]:
    wrong = {}
    if scope not in SCOPES:
        wrong["scope"] = f"{scope[:100]!r} is not valid; allowed: {', '.join(SCOPES)}"
    known = SERVICE_CONDITIONS if scope == SERVICE else CONDITIONS
    if condition not in known:
        text = f"{condition[:100]!r} is not valid; allowed with the scope {scope[:100]}: "
        return wrong | {"condition": text + ", ".join(known)}
    kind = known[condition]
    if kind.value:
        least = 1.0 if kind.value in FROM_ONE else -LARGEST_VALUE
        is_known = value is not None and math.isfinite(value)
        if not is_known or not least <= (value or 0.0) <= LARGEST_VALUE:
            of = "a number" if least < 0 else "a number from 1 on"
            given = "there is none" if value is None else f"it is {value}"
            wrong["value"] = f"{given}; allowed: {of}, the {kind.value} of this condition"
    if kind.has_metric and not 1 <= len(metric) <= NAME_CHARACTERS:
        wrong["metric"] = f"it has {len(metric)} characters; allowed: the name of a metric"
    if scope == PROJECT and not 1 <= len(project) <= NAME_CHARACTERS:
        wrong["project"] = f"it has {len(project)} characters; allowed: the name of a project"
    return wrong
