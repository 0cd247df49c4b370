"""Routes of sweeps: submit, show, pause, resume, extend and cancel."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import audited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import in_project
from app.auth.routing import Router
from app.dependencies import Db, TheDatabase, TheLive, TheSettings
from app.files import weight_uploads
from app.http.active_requests import STREAM
from app.http.parameters import Body, DocumentedModel, RowId, Text
from app.live import sweep_updates
from app.live.streams_api import After, LastEventId
from app.runs.runs_api import Destination
from app.runs.summary import Number
from app.submission.command_lines import Command, as_submitted
from app.sweeps import search_space, sweep_metric, sweep_submission
from app.sweeps.sweep_metric import Goal, Metric
from app.sweeps.sweep_submission import MOST_RUNS, SpaceGiven, SweepSubmission
from db.access import projects
from db.access.permissions import Permission
from db.sweeps import sweeps
from db.sweeps.sweeps import Tally
from db.tables import Run, Status, Sweep, Trial, User
from halfstep.telemetry.plain_json import JsonObject

router = Router(prefix="/sweeps", tags=["sweeps"])

LIVE_SECONDS = 0.5

SweepId = RowId


class SweepTrial(DocumentedModel):
    """A trial of a sweep."""

    number: int
    run_id: int
    name: str
    status: Status
    params: Annotated[JsonObject, Field(description="By path of a setting")]
    state: str
    """open, complete, pruned, or failed: without a finite value"""
    value: Number
    """The metric's last value; for an open trial, the value so far"""


class SweepSummary(BaseModel):
    """A sweep with its progress."""

    id: int
    name: str
    owner: str
    project: str
    source: Annotated[str, Field(description="recipe, command or script (run by agents)")]
    recipe: str
    kind: str
    pruner: Annotated[JsonObject | None, Field(description="Rule that ends weak runs early")]
    space: Annotated[dict[str, str], Field(description="Searches by path of a setting")]
    metric: str
    goal: str
    seed: int
    status: Annotated[str, Field(description="running, paused, finished, cancelled or failed")]
    error: str | None
    runs_total: int
    at_once: int
    submitted: int
    open: Annotated[int, Field(description="Runs that are queued or train")]
    waiting: Annotated[int, Field(description="Failed points that are to be run again")]
    complete: int
    pruned: Annotated[int, Field(description="Ended early by its pruner")]
    failed: int
    best: Number
    created_at: float


class SweepDetail(SweepSummary):
    """A sweep with its common configuration and its best run."""

    command: Annotated[Command | None, Field(description="Instead of a recipe")]
    config: JsonObject
    best_trial: SweepTrial | None
    metrics: Annotated[list[str], Field(description="Logged by its newest runs")]
    warning: Annotated[str, Field(description="About a metric that no run has logged, or empty")]


class SweepList(BaseModel):
    """A page of sweeps."""

    sweeps: list[SweepSummary]
    next: Annotated[int | None, Field(description="`before` of the next page; null on the last")]


class TrialList(BaseModel):
    """A page of trials."""

    trials: list[SweepTrial]
    next: Annotated[int | None, Field(description="`after` of the next page; null on the last")]


class Ranking(Body):
    """The metric by which a sweep compares its runs."""

    metric: Metric
    goal: Goal = ""


class Extension(Body):
    """Extension of a sweep: more runs, or more values of a grid's settings."""

    runs: Annotated[int | None, Field(description="Number of additional runs")] = None
    space: SpaceGiven | None = None


@router.get("", SIGNED_IN)
def list_sweeps(
    session: Db,
    before: Annotated[RowId | None, Query(description="Only sweeps older than this id")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> SweepList:
    """List sweeps, newest first."""
    rows = sweeps.newest(session, before=before, limit=limit)
    return SweepList(
        sweeps=[summary(*row) for row in rows],
        next=rows[-1][0].id if len(rows) == limit else None,
    )


def _lost(_user: AdmittedEarly, body: SweepSubmission, settings: TheSettings) -> dict[str, str]:
    return weight_uploads.lost(settings, body.config)


#: Checked before the session opens, so that no transaction waits for a bucket.
Lost = Annotated[dict[str, str], Depends(_lost)]


@router.post("", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, status_code=201)
@audited("name", "recipe", "project")
def begin_sweep(
    body: Annotated[
        SweepSubmission, in_project(SweepSubmission, Permission.SUBMIT_RUN, is_invalid=True)
    ],
    lost: Lost,
    session: Db,
    principal: SignedIn,
    idempotency_key: Annotated[
        Text | None,
        Header(max_length=200, description="A repeated key returns the first sweep"),
    ] = None,
) -> SweepDetail:
    """Submit a sweep. Error 422 names each invalid field, its value and what is allowed."""
    sweep = sweep_submission.begin(
        session, principal.user, body, idempotency_key=idempotency_key, known=lost
    )
    return detail(session, sweep)


@router.get("/{sweep_id}", Permission.VIEW_RUN)
def get_sweep(sweep_id: SweepId, session: Db) -> SweepDetail:
    """Return a sweep."""
    return detail(session, sweeps.get(session, sweep_id))


@router.get("/{sweep_id}/trials", Permission.VIEW_RUN)
def list_trials(
    sweep_id: SweepId,
    session: Db,
    sort: Annotated[
        Text, Query(description="number, newest first; or value, the best first")
    ] = "number",
    after: Annotated[int, Query(ge=0, le=MOST_RUNS)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_RUNS)] = 100,
) -> TrialList:
    """List a sweep's trials with their parameters and values."""
    sweep = sweeps.get(session, sweep_id)
    rows = sweeps.trials(session, sweep, best_first=sort == "value", after=after, limit=limit)
    return TrialList(
        trials=trials_of(session, sweep, rows),
        next=after + limit if len(rows) == limit else None,
    )


@router.put("/{sweep_id}/project", Permission.MOVE_RUN)
@audited("project")
def move_sweep(
    sweep_id: SweepId,
    body: Annotated[Destination, in_project(Destination, Permission.MOVE_RUN)],
    session: Db,
    principal: SignedIn,
) -> SweepDetail:
    """Move a sweep with its runs to another project. For maintainers of both projects."""
    projects.move_sweep(session, sweep_id, principal.user, body.project)
    return detail(session, sweeps.get(session, sweep_id))


@router.put("/{sweep_id}/metric", Permission.CONTROL_RUN)
@audited("metric")
def change_metric(sweep_id: SweepId, body: Ranking, session: Db) -> SweepDetail:
    """Compare a sweep's runs by another metric, also those that have ended."""
    sweep = sweep_submission.lock(session, sweep_id)
    sweep_metric.change(session, sweep, body.metric, body.goal)
    return detail(session, sweep)


@router.post("/{sweep_id}/cancellation", Permission.CONTROL_RUN)
def cancel_sweep(sweep_id: SweepId, session: Db, principal: SignedIn) -> SweepDetail:
    """Cancel a sweep and its unended runs."""
    return detail(session, sweeps.cancel(session, sweep_id, principal.user))


@router.post("/{sweep_id}/pause", Permission.CONTROL_RUN)
def pause_sweep(sweep_id: SweepId, session: Db) -> SweepDetail:
    """Stop submitting runs until the sweep is resumed; submitted runs continue."""
    return detail(session, sweeps.pause(session, sweep_id))


@router.post("/{sweep_id}/resumption", Permission.CONTROL_RUN)
def resume_sweep(sweep_id: SweepId, session: Db, principal: SignedIn) -> SweepDetail:
    """Resume a paused or failed sweep."""
    sweep_submission.resume(session, sweep_id, principal.user)
    return detail(session, sweeps.get(session, sweep_id))


@router.post("/{sweep_id}/retries", Permission.CONTROL_RUN)
def retry_sweep(sweep_id: SweepId, session: Db, principal: SignedIn) -> SweepDetail:
    """Run the failed points of a sweep again, each as a new run."""
    sweep_submission.retry(session, sweep_id, principal.user)
    return detail(session, sweeps.get(session, sweep_id))


@router.post("/{sweep_id}/extension", Permission.CONTROL_RUN)
def extend_sweep(
    sweep_id: SweepId, more: Extension, session: Db, principal: SignedIn
) -> SweepDetail:
    """Add runs or values of a grid's settings to a sweep."""
    sweep_submission.extend(session, sweep_id, principal.user, runs=more.runs, space=more.space)
    return detail(session, sweeps.get(session, sweep_id))


def _existing(sweep_id: SweepId, session: Db) -> int:
    return sweeps.get(session, sweep_id).id


@router.get(
    "/{sweep_id}/live", Permission.VIEW_RUN, lasts=STREAM, response_class=EventSourceResponse
)
async def stream_sweep(
    database: TheDatabase,
    live: TheLive,
    sweep_id: Annotated[int, Depends(_existing)],
    after: After = "",
    last_event_id: LastEventId = "",
) -> AsyncIterator[ServerSentEvent]:
    """Stream a marker that changes with a sweep or its runs; clients then fetch the sweep."""
    poll = sweep_updates.of_sweep(database, sweep_id)
    subject, cursor = f"sweep {sweep_id}", last_event_id or after
    async for event in live.stream(subject, cursor, poll, seconds=LIVE_SECONDS):
        yield event


def summary(sweep: Sweep, owner: str, tally: Tally) -> SweepSummary:
    """Return the summary of a sweep."""
    return SweepSummary(**_summary_fields(sweep, owner, tally))


def detail(session: Session, sweep: Sweep) -> SweepDetail:
    """Return a sweep without its trials."""
    owner = session.get_one(User, sweep.owner_id).name
    tally = sweeps.tallies(session, [sweep])[sweep.id]
    first = sweeps.trials(session, sweep, best_first=True, limit=1) if tally.complete else []
    best = trials_of(session, sweep, first)
    metrics = sweeps.own_metrics(session, sweep.id)
    line = sweep.command["line"] if sweep.command else ""
    return SweepDetail(
        **_summary_fields(sweep, owner, tally),
        command=as_submitted(sweep.command) if sweep.command is not None else None,
        config=sweep.config,
        best_trial=best[0] if best else None,
        metrics=metrics,
        warning=""
        if best
        else sweep_metric.find_warning(session, sweep.metric, sweep.recipe, line, metrics),
    )


def trials_of(session: Session, sweep: Sweep, rows: list[tuple[Trial, Run]]) -> list[SweepTrial]:
    """Return trials as JSON; open ones have their latest value."""
    under_way = [run for trial, run in rows if trial.state == sweeps.OPEN]
    so_far = sweeps.values(session, sweep.metric, under_way) if under_way else {}
    return [
        SweepTrial(
            number=trial.number,
            run_id=run.id,
            name=run.name,
            status=run.status,
            params=trial.params,
            state=trial.state,
            value=so_far.get(run.id) if trial.state == sweeps.OPEN else trial.value,
        )
        for trial, run in rows
    ]


def _source(sweep: Sweep) -> str:
    if sweep.is_for_agents:
        return "script"
    return "recipe" if sweep.command is None else "command"


_COLUMNS = SweepSummary.model_fields.keys() & (set(Sweep.__table__.columns.keys()) - {"space"})


def _summary_fields(sweep: Sweep, owner: str, tally: Tally) -> dict[str, object]:
    return {
        **{name: getattr(sweep, name) for name in _COLUMNS},
        "status": sweeps.status(sweep, tally),
        "owner": owner,
        "source": _source(sweep),
        "space": {path: search_space.in_words(search) for path, search in sweep.space.items()},
        **{name: getattr(tally, name) for name in Tally.__dataclass_fields__},
    }
