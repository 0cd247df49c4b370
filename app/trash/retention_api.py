"""Routes of retention rules and their preview."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.http.parameters import Body, Text
from app.trash.retention_job import project_of, scope_of
from db.access import projects
from db.files import retention
from db.files.pruning import Pruning, Rules
from db.tables import RetentionRule

router = APIRouter(prefix="/retention", tags=["people"])

Scope = Annotated[
    Text,
    Field(description="all: every project without a rule of its own; or in:PROJECT"),
]
Days = Annotated[float | None, Field(description="1 to 36,500, or null: never deleted")]


class NewRule(Body):
    """Ages in days after which files are deleted."""

    scope: Scope
    checkpoint_days: Days = None
    log_days: Days = None


class Rule(NewRule):
    """A retention rule."""

    set_at: float


class PrunedRun(BaseModel):
    """Files and rows of one run that would be deleted."""

    run_id: int
    name: str
    steps: Annotated[int, Field(description="Number of steps with deleted checkpoints")]
    stored_bytes: int
    log_lines: int
    samples: int


class RulePreview(BaseModel):
    """Preview of the deletions of a rule."""

    runs: Annotated[int, Field(description="Examined runs with something to delete")]
    stored_bytes: Annotated[int, Field(description="Of these runs")]
    largest: list[PrunedRun]
    not_looked_at: Annotated[
        int, Field(description="Further runs with old files, which were not examined")
    ]


@router.get("")
@requires(SIGNED_IN)
def list_rules(session: Db, principal: SignedIn) -> list[Rule]:
    """List the instance's rule, and the rules of visible projects."""
    names = {row.name for row in projects.listed(session, principal.grants.projects)}
    seen = (rule for rule in retention.listed(session) if rule.project in {None, *names})
    return [_row(rule) for rule in seen]


@router.get("/preview")
@requires(SIGNED_IN)
def preview_rule(
    session: Db,
    principal: SignedIn,
    scope: Annotated[Text, Query()],
    checkpoint_days: Annotated[float | None, Query()] = None,
    log_days: Annotated[float | None, Query()] = None,
) -> RulePreview:
    """Preview the deletions of a rule. Requires permission to set the rule."""
    project = project_of(session, principal.grants, scope)
    preview = retention.preview(session, project, _read(checkpoint_days, log_days))
    return RulePreview(
        runs=preview.count,
        stored_bytes=preview.stored_bytes,
        largest=[_pruned(row) for row in preview.largest],
        not_looked_at=preview.not_looked_at,
    )


@router.put("")
@requires(SIGNED_IN)
@audited("scope", "checkpoint_days", "log_days")
def set_rule(body: NewRule, session: Db, principal: SignedIn) -> Rule:
    """Set or replace a rule; within an hour the files of its preview are permanently deleted.

    For a project's maintainers; the rule of all projects for admins.
    """
    project = project_of(session, principal.grants, body.scope)
    rules = _read(body.checkpoint_days, body.log_days)
    return _row(retention.set_rule(session, principal.user, project, rules))


@router.delete("", status_code=204)
@requires(SIGNED_IN)
@audited("scope")
def end_rule(session: Db, principal: SignedIn, scope: Annotated[Text, Query()]) -> None:
    """Delete a rule. Requires permission to set the rule."""
    retention.end_rule(session, project_of(session, principal.grants, scope))


def _read(checkpoint_days: float | None, log_days: float | None) -> Rules:
    days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
    return retention.checked({name: str(age) for name, age in days.items() if age is not None})


def _row(rule: RetentionRule) -> Rule:
    days: dict[str, Any] = {"checkpoint_days": rule.checkpoint_days, "log_days": rule.log_days}
    return Rule(scope=scope_of(rule.project), set_at=rule.set_at, **days)


def _pruned(pruning: Pruning) -> PrunedRun:
    figures = {name: getattr(pruning, name) for name in PrunedRun.model_fields if name != "steps"}
    return PrunedRun(steps=len(pruning.steps), **figures)
