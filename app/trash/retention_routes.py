"""Retention rules and their preview: routes and page."""

from typing import Annotated, Any

from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db, Posted
from app.html.rendering import Context
from app.http.parameters import Body, FormText, Text
from app.trash.retention_job import project_of, scope_of
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.files import retention
from db.files.pruning import PINNED, Pruning, Rules
from db.files.retention import FIELDS, Preview
from db.tables import RetentionRule

api = Router(prefix="/retention", tags=["people"])
pages = Router(prefix="/retention")

Scope = Annotated[
    Text,
    Field(description="all: every project without a rule of its own; or in:PROJECT"),
]
Days = Annotated[float | None, Field(description="1 to 36,500, or null: never deleted")]


class NewRetentionRule(Body):
    """Ages in days after which files are deleted."""

    scope: Scope
    checkpoint_days: Days = None
    log_days: Days = None


class Rule(NewRetentionRule):
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


@api.get("", SIGNED_IN)
def list_rules(session: Db, principal: SignedIn) -> list[Rule]:
    """List the instance's rule, and the rules of visible projects."""
    names = {row.name for row in projects.list_projects(session, principal.grants.projects)}
    seen = (rule for rule in retention.list_rules(session) if rule.project in {None, *names})
    return [_row(rule) for rule in seen]


@api.get("/preview", SIGNED_IN)
def preview_rule(
    session: Db,
    principal: SignedIn,
    scope: Text,
    checkpoint_days: float | None = None,
    log_days: float | None = None,
) -> RulePreview:
    """Preview the deletions of a rule. Requires permission to set the rule."""
    project = project_of(session, principal.grants, scope)
    preview = retention.preview(session, project, _read(checkpoint_days, log_days))
    return RulePreview(
        runs=preview.count,
        stored_bytes=preview.stored_bytes,
        largest=[_describe_pruned(row) for row in preview.largest],
        not_looked_at=preview.not_looked_at,
    )


@api.put("", SIGNED_IN)
@audited("scope", "checkpoint_days", "log_days")
def set_rule(body: NewRetentionRule, session: Db, principal: SignedIn) -> Rule:
    """Set or replace a rule; within an hour the files of its preview are permanently deleted.

    For a project's maintainers; the rule of all projects for admins.
    """
    project = project_of(session, principal.grants, body.scope)
    rules = _read(body.checkpoint_days, body.log_days)
    return _row(retention.set_rule(session, principal.user, project, rules))


@api.delete("", SIGNED_IN, status_code=204)
@audited("scope")
def end_rule(session: Db, principal: SignedIn, scope: Text) -> None:
    """Delete a rule. Requires permission to set the rule."""
    retention.end_rule(session, project_of(session, principal.grants, scope))


def _read(checkpoint_days: float | None, log_days: float | None) -> Rules:
    days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
    return retention.parse({name: str(age) for name, age in days.items() if age is not None})


def _row(rule: RetentionRule) -> Rule:
    days: dict[str, Any] = {"checkpoint_days": rule.checkpoint_days, "log_days": rule.log_days}
    return Rule(scope=scope_of(rule.project), set_at=rule.set_at, **days)


def _describe_pruned(pruning: Pruning) -> PrunedRun:
    figures = {name: getattr(pruning, name) for name in PrunedRun.model_fields if name != "steps"}
    return PrunedRun(steps=len(pruning.steps), **figures)


@pages.get("", SIGNED_IN)
def show_rules(context: Context) -> HTMLResponse:
    """Show the rules of visible projects."""
    return _page(context, {})


@pages.post("", SIGNED_IN)
@audited("scope", "checkpoint_days", "log_days")
def post_rule(context: Context, posted: Posted, scope: FormText = "") -> Response:
    """Set a rule if its preview is confirmed; otherwise show the preview or the errors."""
    project = project_of(context.session, context.principal.grants, scope)
    typed = {"scope": scope} | {name: str(posted.get(name, ""))[:50] for name in FIELDS}
    try:
        rules = retention.parse(typed)
    except Invalid as error:
        return _page(context, typed, errors=error.errors)
    confirmed = repr(rules)
    if str(posted.get("confirmed", "")) != confirmed:
        audit.discard(context.request)  # nothing is changed yet
        preview = retention.preview(context.session, project, rules)
        return _page(context, typed, preview=preview, confirmation=confirmed)
    retention.set_rule(context.session, context.user, project, rules)
    return context.redirect("/retention", "The rule is set.")


@pages.post("/deletion", SIGNED_IN)
@audited("scope")
def post_deletion(context: Context, scope: FormText = "") -> Response:
    """Delete a rule."""
    session = context.session
    retention.end_rule(session, project_of(session, context.principal.grants, scope))
    return context.redirect("/retention", "The rule is deleted.")


def _page(
    context: Context,
    typed: dict[str, str],
    *,
    errors: dict[str, str] | None = None,
    preview: Preview | None = None,
    confirmation: str = "",
) -> HTMLResponse:
    principal = context.principal
    seen = projects.list_projects(context.session, principal.grants.projects)
    names = {row.name for row in seen}
    managed = [
        row.name for row in seen if principal.grants.may(Permission.MANAGE_MEMBERS, row.name)
    ]
    rules = retention.list_rules(context.session)
    return context.render(
        "trash/retention.html",
        rules=[rule for rule in rules if rule.project is None or rule.project in names],
        managed=managed,
        fields=FIELDS,
        pinned=PINNED,
        typed={"scope": "", "checkpoint_days": "", "log_days": ""} | typed,
        errors=errors,
        preview=preview,
        confirmation=confirmation,
    )
