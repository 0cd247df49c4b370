"""Rules of retention: after how many days what of a project's ended runs is deleted.

A project's own rule goes before that of the instance. What they would delete is said before they
are set, by the same functions that `halfstep storage prune` asks (db.files.pruning).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.access import permissions, projects
from db.errors import Invalid
from db.files import pruning
from db.files.pruning import Pruning, Rules
from db.runs import runs
from db.tables import Project, RetentionRule, User

FIELDS = {"checkpoint_days": "Checkpoints", "log_days": "Logs and samples"}
LARGEST_DAYS = 36_500
#: Of a preview: runs that are gone through, the largest first, and those that are named.
LOOKED_AT, NAMED = 500, 20


@dataclass(frozen=True)
class Preview:
    """What a rule would delete now.

    count, stored_bytes: of all runs that were looked at.  largest: some of them.  not_looked_at:
    how many more have something old, of which it is not said how much.
    """

    count: int
    stored_bytes: int
    largest: list[Pruning]
    not_looked_at: int


def listed(session: Session) -> list[RetentionRule]:
    """List all rules, that of the instance first."""
    query = select(RetentionRule).order_by(RetentionRule.project.nulls_first())
    return list(session.scalars(query))


def checked(typed: Mapping[str, str]) -> Rules:
    """Read a rule's days. Raises Invalid: of both fields one has to have some."""
    days: dict[str, float | None] = {}
    errors = {}
    for field, label in FIELDS.items():
        text = typed.get(field, "").strip()
        try:
            days[field] = float(text) if text else None
        except ValueError:
            days[field] = math.nan
        value = days[field]
        if value is not None and not 1 <= value <= LARGEST_DAYS:
            allowed = f"1 to {LARGEST_DAYS:,} days, or nothing"
            errors[field] = f"{label}: {text[:50]} is not allowed; allowed: {allowed}"
    if not errors and all(value is None for value in days.values()):
        errors["checkpoint_days"] = "Both fields are empty; allowed: days in one of them, or both"
    if errors:
        raise Invalid(errors)
    return Rules(**days)


def set_rule(session: Session, user: User, project: str | None, rules: Rules) -> RetentionRule:
    """Set the rule of a project, or of the instance, in place of the one before."""
    if project is not None:
        projects.get(session, project)
    # Of two at once the second waits.
    session.execute(select(Project.name).where(Project.name == "").with_for_update())
    rule = _rule_of(session, project) or RetentionRule(project=project)
    rule.checkpoint_days, rule.log_days = rules.checkpoint_days, rules.log_days
    rule.user_id = user.id
    session.add(rule)
    session.flush()
    return rule


def end_rule(session: Session, project: str | None) -> None:
    """Let a project, or the instance, have no rule of its own; without one it changes nothing."""
    if rule := _rule_of(session, project):
        session.delete(rule)


def preview(session: Session, project: str | None, rules: Rules) -> Preview:
    """Say what a rule would delete, were it set now."""
    with permissions.unlimited(session):  # a run that is not seen may have started from one that is
        found = pruning.candidates(session, rules, _ruled(session, project))
        planned = [
            pruning.of_run(session, runs.get(session, run_id), rules)
            for run_id in found[:LOOKED_AT]
        ]
    going = sorted(filter(None, planned), key=lambda each: each.stored_bytes, reverse=True)
    return Preview(
        count=len(going),
        stored_bytes=sum(each.stored_bytes for each in going),
        largest=going[:NAMED],
        not_looked_at=max(len(found) - LOOKED_AT, 0),
    )


def due(session: Session) -> list[tuple[int, Rules]]:
    """Return the runs that have something old by the rule that is theirs, with it."""
    return [
        (run_id, rules)
        for rule in listed(session)
        for rules in [Rules(rule.checkpoint_days, rule.log_days)]
        for run_id in pruning.candidates(session, rules, _ruled(session, rule.project))
    ]


def _rule_of(session: Session, project: str | None) -> RetentionRule | None:
    is_its = (
        RetentionRule.project.is_(None) if project is None else RetentionRule.project == project
    )
    return session.scalar(select(RetentionRule).where(is_its))


def _ruled(session: Session, project: str | None) -> Collection[str]:
    """Return the projects that a rule is for: of the instance's, those without one of their own."""
    if project is not None:
        return [project]
    own = select(RetentionRule.project).where(RetentionRule.project.is_not(None))
    return list(session.scalars(select(Project.name).where(Project.name.not_in(own))))
