"""Retention rules: age in days after which files of a project's ended runs are deleted.

A project's own rule takes precedence over the instance's. The preview of a rule uses the same
functions as `halfstep storage prune` (db.files.pruning).
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
#: Runs that a preview examines, largest first, and runs that it names.
MOST_EXAMINED, NAMED = 500, 20


@dataclass(frozen=True)
class Preview:
    """Files and rows that a rule would delete now."""

    count: int  # examined runs with something to delete
    stored_bytes: int  # of these runs
    largest: list[Pruning]
    not_looked_at: int  # further runs with old files, not examined


def list_rules(session: Session) -> list[RetentionRule]:
    """List all rules, that of the instance first."""
    query = select(RetentionRule).order_by(RetentionRule.project.nulls_first())
    return list(session.scalars(query))


def parse(texts: Mapping[str, str]) -> Rules:
    """Parse the days of a rule. Raises Invalid; at least one field must be set."""
    days: dict[str, float | None] = {}
    errors = {}
    for field, label in FIELDS.items():
        text = texts.get(field, "").strip()
        try:
            days[field] = float(text) if text else None
        except ValueError:
            days[field] = math.nan
        value = days[field]
        if value is not None and not 1 <= value <= LARGEST_DAYS:
            allowed = f"1 to {LARGEST_DAYS:,} days, or empty"
            errors[field] = f"{label}: {text[:50]} is not valid; allowed: {allowed}"
    if not errors and all(value is None for value in days.values()):
        errors["checkpoint_days"] = "Both fields are empty; allowed: days in one of them, or both"
    if errors:
        raise Invalid(errors)
    return Rules(**days)


def set_rule(session: Session, user: User, project: str | None, rules: Rules) -> RetentionRule:
    """Set or replace the rule of a project, or of the instance."""
    if project is not None:
        projects.get(session, project)
    # Serializes concurrent changes.
    session.execute(select(Project.name).where(Project.name == "").with_for_update())
    rule = _rule_of(session, project) or RetentionRule(project=project)
    rule.checkpoint_days, rule.log_days = rules.checkpoint_days, rules.log_days
    rule.user_id = user.id
    session.add(rule)
    session.flush()
    return rule


def end_rule(session: Session, project: str | None) -> None:
    """Delete the rule of a project or of the instance, if there is one."""
    if rule := _rule_of(session, project):
        session.delete(rule)


def preview(session: Session, project: str | None, rules: Rules) -> Preview:
    """Return a preview of the deletions by a rule."""
    with permissions.lift_limit(session):  # an invisible run may have started from a visible one
        run_ids = pruning.candidates(session, rules, _list_projects_of(session, project))
        planned = [
            pruning.of_run(session, runs.get(session, run_id), rules)
            for run_id in run_ids[:MOST_EXAMINED]
        ]
    prunings = sorted(filter(None, planned), key=lambda row: row.stored_bytes, reverse=True)
    return Preview(
        count=len(prunings),
        stored_bytes=sum(row.stored_bytes for row in prunings),
        largest=prunings[:NAMED],
        not_looked_at=max(len(run_ids) - MOST_EXAMINED, 0),
    )


def due(session: Session) -> list[tuple[int, Rules]]:
    """Return the runs with something to delete by the rule of their project, with that rule."""
    return [
        (run_id, rules)
        for rule in list_rules(session)
        for rules in [Rules(rule.checkpoint_days, rule.log_days)]
        for run_id in pruning.candidates(session, rules, _list_projects_of(session, rule.project))
    ]


def _rule_of(session: Session, project: str | None) -> RetentionRule | None:
    is_its = (
        RetentionRule.project.is_(None) if project is None else RetentionRule.project == project
    )
    return session.scalar(select(RetentionRule).where(is_its))


def _list_projects_of(session: Session, project: str | None) -> Collection[str]:
    """Return the projects of a rule: the instance's rule is for projects without their own."""
    if project is not None:
        return [project]
    own = select(RetentionRule.project).where(RetentionRule.project.is_not(None))
    return list(session.scalars(select(Project.name).where(Project.name.not_in(own))))
