"""Rules of retention: what they are, what one would delete, and that it is set."""

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
    Field(description="all: of every project without a rule of its own; or in: and a project"),
]
Days = Annotated[float | None, Field(description="1 to 36,500, or null: kept")]


class RuleWanted(Body):
    """After how many days what is deleted."""

    scope: Scope
    checkpoint_days: Days = None
    log_days: Days = None


class Rule(RuleWanted):
    """One that is set."""

    set_at: float


class PrunedRun(BaseModel):
    """What would be deleted of one run. steps: how many lose their checkpoints."""

    run_id: int
    name: str
    steps: int
    stored_bytes: int
    log_lines: int
    samples: int


class RulePreview(BaseModel):
    """What a rule would delete now. runs, stored_bytes: of those that were looked at."""

    runs: int
    stored_bytes: int
    largest: list[PrunedRun]
    not_looked_at: Annotated[
        int, Field(description="More runs that have something old, of which it is not said what")
    ]


@router.get("")
@requires(SIGNED_IN)
def list_rules(session: Db, principal: SignedIn) -> list[Rule]:
    """List the instance's rule, and those of the projects that you see."""
    names = {each.name for each in projects.listed(session, principal.grants.projects)}
    seen = (rule for rule in retention.listed(session) if rule.project in {None, *names})
    return [_told(rule) for rule in seen]


@router.get("/preview")
@requires(SIGNED_IN)
def preview_rule(
    session: Db,
    principal: SignedIn,
    scope: Annotated[Text, Query()],
    checkpoint_days: Annotated[float | None, Query()] = None,
    log_days: Annotated[float | None, Query()] = None,
) -> RulePreview:
    """Say what a rule would delete, were it set now. For who may set it."""
    project = project_of(session, principal.grants, scope)
    found = retention.preview(session, project, _read(checkpoint_days, log_days))
    return RulePreview(
        runs=found.count,
        stored_bytes=found.stored_bytes,
        largest=[_pruned(each) for each in found.largest],
        not_looked_at=found.not_looked_at,
    )


@router.put("")
@requires(SIGNED_IN)
@audited("scope", "checkpoint_days", "log_days")
def set_rule(wanted: RuleWanted, session: Db, principal: SignedIn) -> Rule:
    """Set a rule in place of the one before; within the hour it deletes, for good, what a preview
    tells. For a project's maintainers; that of all for operators.
    """
    project = project_of(session, principal.grants, wanted.scope)
    rules = _read(wanted.checkpoint_days, wanted.log_days)
    return _told(retention.set_rule(session, principal.user, project, rules))


@router.delete("", status_code=204)
@requires(SIGNED_IN)
@audited("scope")
def end_rule(session: Db, principal: SignedIn, scope: Annotated[Text, Query()]) -> None:
    """Let nothing more be deleted by a rule. For who may set it."""
    retention.end_rule(session, project_of(session, principal.grants, scope))


def _read(checkpoint_days: float | None, log_days: float | None) -> Rules:
    typed = {"checkpoint_days": checkpoint_days, "log_days": log_days}
    return retention.checked({name: str(each) for name, each in typed.items() if each is not None})


def _told(rule: RetentionRule) -> Rule:
    days: dict[str, Any] = {"checkpoint_days": rule.checkpoint_days, "log_days": rule.log_days}
    return Rule(scope=scope_of(rule.project), set_at=rule.set_at, **days)


def _pruned(found: Pruning) -> PrunedRun:
    figures = {name: getattr(found, name) for name in PrunedRun.model_fields if name != "steps"}
    return PrunedRun(steps=len(found.steps), **figures)
