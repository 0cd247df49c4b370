"""Routes of sweeps for agents: begin one, take its points, keep and return them.

A token that uploads watched runs may use them, so that an agent needs no other.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.auth.audit import audited, set_runs, unaudited
from app.auth.authentication import NotForSending, SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import in_project
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import Body, RowId, Text
from app.submission import config_schema
from app.sweeps import search_space, sweep_submission
from app.sweeps.pruning import Pruner
from app.sweeps.sweep_submission import SpaceGiven, SweepSubmission
from app.sweeps.sweeps_api import SweepDetail, SweepId, detail
from db.access.permissions import Permission
from db.sweeps import agent_claims, sweeps
from db.tables import Sweep
from halfstep.telemetry.plain_json import JsonObject

router = Router(prefix="/sweeps", tags=["sweeps"])

AgentId = Annotated[str, Field(pattern="^[0-9a-f]{32}$", description="Chosen by the agent")]


class AgentSweep(Body):
    """A sweep whose points agents take: of any script, without a recipe or a worker."""

    space: Annotated[
        SpaceGiven,
        Field(description=f"Searches by name: a list of values, or {search_space.NOTATION}"),
    ]
    config: Annotated[JsonObject, Field(description="Common to all runs", default_factory=dict)]
    kind: Literal["grid", "random", "tpe", "cmaes", "qmc"] = "grid"
    pruner: Pruner | None = None
    metric: str = sweeps.LOSS
    goal: str = ""
    runs: int | None = None
    seed: int = 0
    name: Text = ""
    tags: Text = ""
    project: Text | None = None


class Agent(Body):
    """An agent."""

    agent: AgentId


class EndedScript(Agent):
    """The end of the script of a point."""

    was_watched: Annotated[bool, Field(description="Whether it called `halfstep.watch`")]


class Claim(BaseModel):
    """A point that an agent has, or none."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    state: Literal["run", "wait", "over"]
    """wait: a point may be returned; over: no point is left"""
    number: Annotated[int | None, Field(description="Number of the trial")] = None
    run: int | None = None
    watch_id: Annotated[str | None, Field(description="Identifier of the watched run")] = None
    name: str = ""
    project: str = ""
    params: Annotated[JsonObject, Field(description="By name of a setting")] = {}
    config: Annotated[JsonObject, Field(description="Of the run, with the point's settings")] = {}
    lease_seconds: float = agent_claims.LEASE_SECONDS


class Renewal(BaseModel):
    """The state of a renewed claim."""

    is_active: Annotated[bool, Field(description="False: a user has ended the run or the sweep")]


@router.post(
    "/agents", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, for_uploads=True, status_code=201
)
@audited("name", "project")
def begin_agent_sweep(
    body: Annotated[
        AgentSweep,
        in_project(AgentSweep, Permission.SUBMIT_RUN, is_invalid=True, is_created=True),
    ],
    session: Db,
    principal: SignedIn,
) -> SweepDetail:
    """Begin a sweep for agents. Error 422 names each invalid field.

    An administrator's project is created if missing, as that of a watched run.
    """
    submission = SweepSubmission(agents=True, **body.model_dump())
    return detail(session, sweep_submission.begin(session, principal.user, submission))


@router.post("/{sweep_id}/claims", Permission.SUBMIT_RUN, for_uploads=True)
def claim_point(sweep_id: SweepId, body: Agent, session: Db, principal: SignedIn) -> Claim:
    """Take a point of a sweep: one that was given back, else the next one.

    The audit log records only a claim that gives a point. Error 403: the token may not upload its
    run.
    """
    if not principal.may_upload:
        raise NotForSending
    sweep = sweep_submission.lock(session, sweep_id)
    claimed = agent_claims.take(
        session,
        sweep,
        principal.user,
        body.agent,
        next_point=sweep_submission.next_point,
        config_of=_config,
        name_of=search_space.name,
    )
    if claimed is None:
        set_runs(session, [])  # an agent polls until there is a point
        may_follow = sweep.status == sweeps.PAUSED or (
            sweep.status == sweeps.RUNNING and bool(sweeps.under_way(session, sweep))
        )
        return Claim(state="wait" if may_follow else "over")
    trial, run = claimed
    return Claim(
        state="run",
        number=trial.number,
        run=run.id,
        watch_id=run.watch_id,
        name=run.name,
        project=run.project,
        params=trial.params,
        config=run.config,
    )


@router.put("/{sweep_id}/claims/{number}", Permission.SUBMIT_RUN, for_uploads=True)
@unaudited("A heartbeat: the claim itself is recorded.")
def renew_claim(sweep_id: SweepId, number: RowId, body: Agent, session: Db) -> Renewal:
    """Renew the lease of a point. Error 409: another agent may have it."""
    sweep = sweeps.get(session, sweep_id, lock=True)
    return Renewal(is_active=agent_claims.renew(session, sweep, number, body.agent))


@router.post(
    "/{sweep_id}/claims/{number}/end", Permission.SUBMIT_RUN, for_uploads=True, status_code=204
)
def end_claim(sweep_id: SweepId, number: RowId, body: EndedScript, session: Db) -> None:
    """Record that the script of a point has ended."""
    sweep = sweeps.get(session, sweep_id, lock=True)
    agent_claims.finish(session, sweep, number, body.agent, was_watched=body.was_watched)


@router.post(
    "/{sweep_id}/claims/{number}/return", Permission.SUBMIT_RUN, for_uploads=True, status_code=204
)
def return_claim(sweep_id: SweepId, number: RowId, body: Agent, session: Db) -> None:
    """Give a point back, for another agent."""
    sweep = sweeps.get(session, sweep_id, lock=True)
    agent_claims.give_back(session, sweep, number, body.agent)


def _config(sweep: Sweep, point: JsonObject) -> JsonObject:
    config: JsonObject = config_schema.with_defaults({}, sweep.config)
    for path, value in point.items():
        config_schema.put(config, path, value)
    return config
