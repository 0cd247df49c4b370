"""JSON routes of runs: list, submit, show and control."""

from typing import Annotated, Any

from fastapi import Depends, Header, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import in_project
from app.auth.routing import Router
from app.dependencies import Db, TheSettings
from app.files import weight_uploads
from app.http.parameters import Body, DocumentedModel, RunId, Sort, Text, flaws
from app.http.responses import serialize
from app.runs import columns, continue_run, filters
from app.runs.summary import Number, RunSummary, summaries_as_json, summarise
from app.submission.command_lines import Command, as_submitted
from app.submission.submission import PriorityNumber, Submission, submit
from app.telemetry import config_values
from app.telemetry.config_values import Setting
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import run_control
from db.runs import run_metadata, runs
from db.runs.run_filters import ORDERS
from db.settings import Settings
from db.sweeps import sweeps
from db.tables import Status

router = Router(prefix="/runs", tags=["runs"])

IdempotencyKey = Annotated[
    Text | None,
    Header(max_length=200, description="A request with the same key does not queue a second run"),
]


class ListedRun(RunSummary):
    """A run with the requested columns."""

    values: Annotated[
        dict[str, Number | str], Field(description="Values of its settings and metrics by name")
    ]


class RunList(DocumentedModel):
    """A page of runs."""

    runs: list[ListedRun]
    total: Annotated[int, Field(description="Number of runs on all pages")]
    next: Annotated[int | None, Field(description="`before` of the next page; null on the last")]
    notes: list[str]
    """Names in filter, sort and values that no run has"""


class StatusChange(BaseModel):
    """When and why a run changed status."""

    attempt: int
    status: Status
    reason: str | None
    failure_kind: Annotated[
        str | None,
        Field(
            description="infrastructure, code, settings (a value is wrong, or a required file or "
            "device is missing), rule (of its configuration) or null"
        ),
    ]
    time: float


class RunDetail(RunSummary):
    """A run with its configuration and history."""

    note: Annotated[str, Field(description="Its note, in Markdown")]
    command: Annotated[Command | None, Field(description="Null for recipes and watched runs")]
    config: dict[str, Any]
    changed_settings: Annotated[
        list[Setting], Field(description="Settings that differ from their known defaults")
    ]
    sweep_id: Annotated[int | None, Field(description="Sweep that it belongs to")]
    statuses: list[StatusChange]


class SeenLabels(Body):
    """Name, tags and note as the client last saw them."""

    name: str | None = None
    tags: list[str] | None = None
    note: str | None = None


class Labels(SeenLabels):
    """Fields to change; missing or null fields stay."""

    seen: SeenLabels | None = None
    """Values before the edit: 409 if one has changed since"""


class QueuePosition(Body):
    """Target position in the queue."""

    before_id: Annotated[RunId, Field(description="Run to insert it before")]


class Priority(Body):
    """Queue priority: higher starts sooner."""

    priority: PriorityNumber


class Destination(Body):
    """Target project."""

    project: Annotated[Text, Field(description="'' is the Default project")]


class ScaleRequest(Body):
    """A loss scale to set from the next step on."""

    scale: float


class ReplayRequest(Body):
    """A past or future step to replay."""

    step: int


class AcceptedRequest(BaseModel):
    """A control request that the training applies at its next step."""

    id: int


@router.get("", SIGNED_IN, response_model=RunList)
def list_runs(
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    filter: Annotated[  # noqa: A002 - its name in the URL
        str,
        Query(
            description="Terms combined with AND: a text, status:failed, since:7d, tag:lr, x>10, a "
            "setting or metric as val/accuracy>0.9, metrics.loss>1; - negates a term"
        ),
    ] = "",
    sort: Annotated[
        Sort,
        Query(
            description=f"{', '.join(ORDERS)}, or a setting or metric (metrics.loss where a column "
            "has its name); descending with - before it"
        ),
    ] = "-id",
    values: Annotated[
        Text, Query(description="Comma-separated settings and metrics to return")
    ] = "",
    before: Annotated[
        RunId | None, Query(description="Only runs after this one in the list")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """List runs, by default newest first; runs without a loss come last when sorted by it."""
    terms = filters.read(filter, me=principal.user.name)
    page = runs.page_of_list(session, conditions=terms, sort=sort, before=before, limit=limit)
    rows = page.rows
    own = [column for column in columns.chosen(values) if column.is_own] if values else []
    values_of_runs = columns.values(session, [run.id for run, _owner in rows], own)
    listed = RunList(
        runs=[
            ListedRun(**summary, values=values_of_runs[summary["id"]])
            for summary in summaries_as_json(session, rows, settings)
        ],
        total=page.total,
        next=rows[-1][0].id if len(rows) == limit else None,
        notes=filters.notes(session, terms, sort, [column.name for column in own]),
    )
    return serialize(listed)


def _lost(_user: AdmittedEarly, body: Submission, settings: TheSettings) -> dict[str, str]:
    return weight_uploads.lost(settings, body.config)


#: Resolved before the session, so that no transaction waits for a bucket.
Lost = Annotated[dict[str, str], Depends(_lost)]


@router.post("", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, status_code=201)
@audited("name", "recipe", "project")
def submit_run(
    body: Annotated[Submission, in_project(Submission, Permission.SUBMIT_RUN, is_invalid=True)],
    lost: Lost,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    idempotency_key: IdempotencyKey = None,
) -> RunSummary:
    """Queue a run. 422 names each bad field, its value and what is allowed."""
    run = submit(session, principal.user, body, idempotency_key=idempotency_key, known=lost)
    audit.set_runs(session, [run.id])
    return summarise(session, run, principal.user.name, settings)


@router.get("/{run_id}", Permission.VIEW_RUN, response_model=RunDetail)
def get_run(run_id: RunId, session: Db, settings: TheSettings) -> Response:
    """Return one run."""
    return serialize(_detail(session, run_id, settings))


def _detail(session: Session, run_id: int, settings: Settings) -> RunDetail:
    run, owner = runs.get_with_owner(session, run_id)
    summary = summarise(session, run, owner, settings)
    statuses = [
        StatusChange.model_validate(row, from_attributes=True)
        for row in runs.statuses(session, run_id)
    ]
    command = as_submitted(run.command) if run.command else None
    trial = sweeps.of_run(session, run_id)
    return RunDetail(
        **vars(summary),
        note=run.note,
        command=command,
        config=run.whole_config,
        changed_settings=config_values.select_changed(config_values.settings_of(session, run)),
        sweep_id=trial.sweep_id if trial else None,
        statuses=statuses,
    )


@router.patch("/{run_id}", Permission.CONTROL_RUN)
@audited("name", "tags")
def edit_run(
    run_id: RunId, body: Labels, session: Db, settings: TheSettings, principal: SignedIn
) -> RunDetail:
    """Change a run's name, tags or note, whatever its status."""
    changes = body.model_dump(exclude_none=True, exclude={"seen"})
    if errors := flaws(changes):
        raise Invalid(errors)
    seen = body.seen.model_dump(exclude_none=True) if body.seen else None
    run_metadata.edit(session, run_id, principal.user, changes, seen)
    return _detail(session, run_id, settings)


@router.put("/{run_id}/project", Permission.MOVE_RUN)
@audited("project")
def move_run(
    run_id: RunId,
    body: Annotated[Destination, in_project(Destination, Permission.MOVE_RUN)],
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
) -> RunSummary:
    """Move a run to another project. Requires the maintainer role in both."""
    projects.move(session, run_id, principal.user, body.project)
    return _summary(session, run_id, settings)


@router.get("/{run_id}/config", Permission.VIEW_RUN)
def get_config(run_id: RunId, session: Db) -> dict[str, Any]:
    """Return a run's configuration, in a form that can be submitted again."""
    return runs.get(session, run_id).config


@router.post("/{run_id}/cancellation", Permission.CONTROL_RUN)
def cancel_run(
    run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn
) -> RunSummary:
    """Cancel a run; a training run saves a checkpoint first. Idempotent."""
    run_control.cancel(session, run_id, principal.user)
    return _summary(session, run_id, settings)


@router.post("/{run_id}/kill", Permission.CONTROL_RUN)
def kill_run(run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn) -> RunSummary:
    """Force-stop a training run: progress since its last checkpoint is lost."""
    run_control.kill(session, run_id, principal.user)
    return _summary(session, run_id, settings)


@router.post("/{run_id}/pause", Permission.CONTROL_RUN)
def pause_run(run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn) -> RunSummary:
    """Pause a run, with a checkpoint."""
    run_control.pause(session, run_id, principal.user)
    return _summary(session, run_id, settings)


@router.post("/{run_id}/resumption", Permission.CONTROL_RUN)
def resume_run(
    run_id: RunId, session: Db, settings: TheSettings, principal: SignedIn
) -> RunSummary:
    """Queue a paused run again."""
    run_control.resume(session, run_id, principal.user)
    return _summary(session, run_id, settings)


@router.post("/{run_id}/continuation", Permission.SUBMIT_RUN, status_code=201)
def continue_from_checkpoint(
    run_id: RunId,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    idempotency_key: IdempotencyKey = None,
) -> RunSummary:
    """Queue the remaining steps of a cancelled or failed run, from its last checkpoint."""
    run = continue_run.continue_run(
        session, principal.user, run_id, idempotency_key=idempotency_key
    )
    return summarise(session, run, principal.user.name, settings)


@router.post("/{run_id}/checkpoints", Permission.CONTROL_RUN, status_code=202)
def request_checkpoint(run_id: RunId, session: Db, principal: SignedIn) -> AcceptedRequest:
    """Request a checkpoint now."""
    return AcceptedRequest(id=run_control.request_checkpoint(session, run_id, principal.user).id)


@router.post("/{run_id}/scale", Permission.CONTROL_RUN, status_code=202)
@audited("scale")
def set_scale(
    run_id: RunId, body: ScaleRequest, session: Db, principal: SignedIn
) -> AcceptedRequest:
    """Request another loss scale for a running fp16 run."""
    return AcceptedRequest(
        id=run_control.request_scale(session, run_id, principal.user, body.scale).id
    )


@router.post("/{run_id}/replays", Permission.CONTROL_RUN, status_code=202)
@audited("step")
def replay_step(
    run_id: RunId, body: ReplayRequest, session: Db, principal: SignedIn
) -> AcceptedRequest:
    """Request the replay of a step, to find the operation that overflowed."""
    return AcceptedRequest(
        id=run_control.request_replay(session, run_id, principal.user, body.step).id
    )


@router.post("/{run_id}/precision-diffs", Permission.CONTROL_RUN, status_code=202)
def request_precision_diff(run_id: RunId, session: Db, principal: SignedIn) -> AcceptedRequest:
    """Request a comparison of the next step's batch with fp32, module by module."""
    request = run_control.request_precision_diff(session, run_id, principal.user)
    return AcceptedRequest(id=request.id)


@router.put("/{run_id}/priority", Permission.PRIORITIZE_RUN)
@audited("priority")
def set_priority(
    run_id: RunId, body: Priority, session: Db, settings: TheSettings, principal: SignedIn
) -> RunSummary:
    """Change the priority of a queued run."""
    run_control.set_priority(session, run_id, body.priority, principal.user)
    return _summary(session, run_id, settings)


@router.put("/{run_id}/place", Permission.PRIORITIZE_RUN)
@audited("before_id")
def move_in_queue(
    run_id: RunId, body: QueuePosition, session: Db, settings: TheSettings, principal: SignedIn
) -> RunSummary:
    """Move a queued run before another one."""
    run_control.move(session, run_id, body.before_id, principal.user)
    return _summary(session, run_id, settings)


def _summary(session: Db, run_id: RunId, settings: TheSettings) -> RunSummary:
    run, owner = runs.get_with_owner(session, run_id)
    return summarise(session, run, owner, settings)
