"""Submission of sweeps and of their runs; the holder of a sweep's row lock submits.

The server polls all sweeps every second; a request that changes one continues it immediately. Both
may be killed, or run concurrently, at any moment: see db.sweeps.sweeps.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy.orm import Session

from app.auth import project_parameters
from app.http.parameters import LARGEST_INTEGER, find_outsized, flaw, flaws, nonfinite
from app.submission import command_lines, config_schema
from app.submission.command_lines import Command, Parameter
from app.submission.config_schema import Schema
from app.submission.submission import (
    LENGTHS,
    LIMITS,
    Submission,
    check_commands,
    submit,
    usual_project,
)
from app.submission.submission import check as check_run
from app.sweeps import optuna_study, pruning, search_space
from app.sweeps.pruning import Pruner
from app.sweeps.search_space import GRID, KINDS, Space
from app.sweeps.sweep_metric import (
    METRIC_CHARACTERS,
    Goal,
    Metric,
    check_metric,
    find_warning,
    goal_of,
)
from db.access import permissions, projects
from db.database import Database, is_outage
from db.errors import Conflict, HalfstepError, Invalid, NotFound
from db.names import clean
from db.queue import quotas, workers
from db.queue.idempotency import hash_of_request, made_by
from db.sweeps import sweeps
from db.sweeps.sweeps import LOSS, PAUSED, RUNNING
from db.tables import TRAIN, Sweep, User
from halfstep.cli import command_line
from halfstep.telemetry.plain_json import JsonObject

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
MOST_AT_ONCE = 100
#: Default number of runs of a search other than a grid.
USUAL_RUNS = 20
#: Runs that one transaction submits: on SQLite all other writers wait for it.
PER_TRANSACTION = 10
BROKEN = "An error occurred on the server. Its log has the details."

SpaceGiven = dict[str, str | list[Any] | dict[str, Any]]


class SweepSubmission(BaseModel):
    """A sweep to begin: runs of a recipe or a command that differ in the settings of its space.

    Missing settings get the default of the recipe or parameter.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    recipe: Annotated[str, Field(description="Name of a recipe that a worker offers")] = ""
    command: Annotated[Command | None, Field(description="Instead of a recipe")] = None
    agents: Annotated[
        bool,
        Field(
            description="Instead of a recipe: agents take the points, by `halfstep agent SWEEP`; "
            "at_once, priority, nodes and devices do not apply"
        ),
    ] = False
    config: Annotated[JsonObject, Field(description="Common to all runs")] = {}
    space: Annotated[
        SpaceGiven,
        Field(
            description="Searches by path of a setting (training.lr), or by placeholder of a "
            f"command: a list of values, or a text: {search_space.NOTATION}"
        ),
    ]
    kind: Annotated[
        str,
        Field(description=f"How points are chosen: {', '.join(KINDS)}"),
    ] = GRID
    pruner: Annotated[
        Pruner | None,
        BeforeValidator(lambda given: {"kind": given} if isinstance(given, str) else given),
    ] = None
    """Ends weak runs early; its kind as text, or an object"""
    metric: Metric = LOSS
    goal: Goal = ""
    runs: int | None = None
    """Number of runs; null: every point of a grid, or 20"""
    at_once: Annotated[int, Field(description="Limit of runs that are queued or train")] = 1
    seed: Annotated[int, Field(description="Seed of random searches")] = 0
    name: str = ""
    tags: str = ""
    project: str | None = None
    """Null: the first one with permission to submit"""
    priority: int = 0
    preemptible: bool = False
    nodes: int = 1
    devices_per_node: int = 1


class Checked(NamedTuple):
    """A validated sweep."""

    command: JsonObject  # as stored; empty for a recipe
    config: JsonObject  # common to all runs
    space: Space
    goal: str
    runs: int  # number of runs
    errors: dict[str, str]  # by path of the field
    warning: str = ""  # about its metric
    confirmation: str = ""  # of its preview; changes with anything that is submitted


def check(session: Session, user: User, submission: SweepSubmission) -> Checked:
    """Validate a sweep; return what to run and the errors."""
    errors, given = _check_plan(submission) | _check_project(session, user, submission), submission
    if submission.command is not None:
        submission = submission.model_copy(
            update={"command": _declare(submission.command, submission.space)}
        )
    schema, wrong = _schema(session, user, submission)
    errors |= wrong
    if wrong and not schema:
        return Checked({}, {}, {}, "", 0, errors)
    space, wrong = _read(
        schema, submission.space, submission.kind, is_command=submission.command is not None
    )
    wrong |= _check_searched(session, submission.space) | _check_task(submission)
    if errors | wrong:
        return Checked({}, {}, space, "", 0, errors | wrong)
    point = (
        next(search_space.grid(space))
        if submission.kind == GRID
        else optuna_study.suggest(space, submission.kind, "", submission.seed, [])
    )
    runs, wrong = _count(submission, space)
    confirmation = confirmation_of(given, runs)
    if submission.agents:
        goal, unknown = goal_of(submission.metric, submission.goal, submission.config)
        errors |= wrong | unknown
        return Checked({}, submission.config, space, goal, runs, errors, "", confirmation)
    first = check_run(session, _submission(submission, schema, point))
    goal, unknown = goal_of(submission.metric, submission.goal, first.config)
    line = submission.command.line if submission.command else ""
    warning = find_warning(session, submission.metric, submission.recipe, line, [])
    if unknown and warning:
        unknown = {"metric": warning} | unknown
    errors = first.errors | wrong | unknown
    return Checked(first.command, first.config, space, goal, runs, errors, warning, confirmation)


def confirmation_of(submission: SweepSubmission, runs: int) -> str:
    """Return the text that confirms the preview of a sweep."""
    return hash_of_request([runs, submission.model_dump(mode="json")])


def _check_project(session: Session, user: User, submission: SweepSubmission) -> dict[str, str]:
    """Reject a project to which the user may not submit."""
    grants = permissions.limits(session) or permissions.grants(session, user)
    project = usual_project(session, user) if submission.project is None else submission.project
    return project_parameters.errors_of(session, grants, project)


def _check_searched(session: Session, space: SpaceGiven) -> dict[str, str]:
    """Reject a search over initial weights with a token of one project.

    Later runs of a sweep are submitted with the owner's permissions, which may be wider.
    """
    grants = permissions.limits(session)
    if grants is None or grants.only is None:
        return {}
    text = "a token of one project cannot search weights; allowed: one value, in config"
    return {path: text for path in space if path.partition(".")[0] == "weights"}


def _check_task(submission: SweepSubmission) -> dict[str, str]:
    """Reject runs of a recipe that measure instead of training: they have no metric to compare."""
    if submission.command is not None or submission.agents:
        return {}
    task = config_schema.get(submission.config, "lab.task", TRAIN)
    if "lab.task" not in submission.space and task == TRAIN:
        return {}
    text = "searched" if "lab.task" in submission.space else f"{str(task)[:50]} is not valid"
    return {"lab.task": f"{text}; allowed: {TRAIN}, since a sweep compares trainings"}


def _declare(command: Command, space: SpaceGiven) -> Command:
    """Return a command with a declared type for each searched placeholder."""
    try:
        names = command_line.placeholders(command.line)
    except ValueError:
        return command  # its line is rejected later
    searched = {name: space[name] for name in names if name in space}
    guessed = {name: Parameter(**search_space.guess(text)) for name, text in searched.items()}
    return command.model_copy(update={"parameters": guessed | command.parameters})


def _schema(
    session: Session, user: User, submission: SweepSubmission
) -> tuple[Schema, dict[str, str]]:
    """Return the schema of the runs, empty if unknown, and errors."""
    if submission.agents:
        return _schema_of_agents(submission)
    if submission.command is None:
        return _schema_of_recipe(session, submission)
    if submission.recipe:
        return {}, {"recipe": f"{submission.recipe[:100]!r} and a command; allowed: one of the two"}
    if wrong := check_commands(session, user):
        return {}, wrong
    devices = submission.devices_per_node
    stored, _, wrong = command_lines.check(session, submission.command, submission.config, devices)
    searched = {f"config.{name}" for name in submission.space}
    wrong = {path: text for path, text in wrong.items() if path not in searched}
    is_known = bool(stored["parameters"]) and all(path.startswith("config.") for path in wrong)
    return command_lines.schema(stored["parameters"]) if is_known or not wrong else {}, wrong


def _schema_of_agents(submission: SweepSubmission) -> tuple[Schema, dict[str, str]]:
    """Return the schema of settings that only the agents' script knows: of the searched ones."""
    if submission.recipe or submission.command:
        return {}, {"agents": "with a recipe or a command; allowed: one of the three"}
    config = {"config": submission.config}
    wrong = find_outsized(submission.config) or flaws(config) | nonfinite(config)
    wrong |= {
        path[:100]: "allowed: a name of at most 200 characters"
        for path in submission.space
        if not path.strip() or len(path) > METRIC_CHARACTERS or flaw(path)
    }
    return _guess_schema(submission.space), wrong


def _guess_schema(space: SpaceGiven) -> Schema:
    """Return the schema of searched settings, with types inferred from their values."""
    properties = {path: search_space.guess(search) for path, search in space.items()}
    return {"type": "object", "properties": properties}


def _schema_of_recipe(
    session: Session, submission: SweepSubmission
) -> tuple[Schema, dict[str, str]]:
    if not submission.recipe:
        return {}, {"recipe": "Field required, or a command"}
    try:
        schema = workers.recipe(session, submission.recipe)["schema"]
    except NotFound as error:
        return {}, {"recipe": str(error)}
    return schema, config_schema.mistakes(
        schema, config_schema.with_defaults(schema, submission.config)
    )


def _read(
    schema: Schema, searches: SpaceGiven, kind: str, *, is_command: bool
) -> tuple[Space, dict[str, str]]:
    """Return the space and its errors; a placeholder may have the name of a field."""
    space, errors = search_space.read(schema, searches, kind)
    if not is_command:
        return space, errors
    known = schema["properties"]
    by_field = {f"space.{path}" if path in known else path: text for path, text in errors.items()}
    for name in searches.keys() - known.keys():
        by_field.pop(name[:100], None)
        allowed = ", ".join(known) or "none: the line has no placeholders"
        by_field[f"space.{name[:100]}"] = f"the line has no such placeholder; allowed: {allowed}"
    return space, by_field


def _check_plan(submission: SweepSubmission) -> dict[str, str]:
    errors = {}
    if submission.kind not in KINDS:
        errors["kind"] = f"{submission.kind[:100]!r} is not valid; allowed: {', '.join(KINDS)}"
    bounds = {
        "runs": (1, _most_runs(submission)),
        "at_once": (1, MOST_AT_ONCE),
        "seed": (0, LARGEST_INTEGER),
        **{name: LIMITS[name] for name in ("priority", "nodes", "devices_per_node")},
    }
    for name, (low, high) in bounds.items():
        value = getattr(submission, name)
        if value is not None and not low <= value <= high:
            text = f"{str(value)[:50]} is not valid; allowed: a whole number from {low} to {high}"
            errors[name] = text
    return errors | check_metric(submission.metric, submission.goal)


def _most_runs(sweep: SweepSubmission | Sweep) -> int:
    return pruning.MOST_RUNS if sweep.pruner else MOST_RUNS


def _count(submission: SweepSubmission, space: Space) -> tuple[int, dict[str, str]]:
    if submission.kind != GRID:
        return submission.runs or USUAL_RUNS, {}
    size = search_space.grid_size(space)
    if size > (most := _most_runs(submission)):
        text = f"the grid has {size:,} points; allowed: {most:,} at most"
        return 0, {"space": text}
    return min(submission.runs or size, size), {}


def _submission(
    sweep: SweepSubmission | Sweep, schema: Schema | None, point: JsonObject
) -> Submission:
    """Return the run of a point. schema: adds defaults to an incomplete configuration."""
    config = config_schema.with_defaults(schema or {}, sweep.config)
    for path, value in point.items():
        config_schema.put(config, path, value)
    name = search_space.name(point) if isinstance(sweep, Sweep) else sweep.name
    command = sweep.command
    return Submission(
        recipe=sweep.recipe,
        command=command_lines.as_submitted(command) if isinstance(command, dict) else command,
        config=config,
        name=name[: LENGTHS["name"]] if isinstance(sweep, Sweep) else name,
        tags=sweep.tags,
        project=sweep.project,
        priority=sweep.priority,
        preemptible=sweep.preemptible,
        nodes=sweep.nodes,
        devices_per_node=sweep.devices_per_node,
    )


def begin(
    session: Session,
    user: User,
    submission: SweepSubmission,
    *,
    idempotency_key: str | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Sweep:
    """Validate and begin a sweep, or return the sweep of the same idempotency key.

    known: errors that are already known.  Raises Invalid.
    """
    request_hash = hash_of_request(submission.model_dump(mode="json"))
    before = made_by(session, Sweep, user, idempotency_key, request_hash)
    if before is not None:
        return before
    checked = check(session, user, submission)
    if errors := {**known, **checked.errors}:
        raise Invalid(errors)
    project = usual_project(session, user) if submission.project is None else submission.project
    projects.lock_shared(session, project)
    subject = submission.recipe or "agents"
    if submission.command:
        subject = command_lines.default_name(submission.command.line)
    sweep = Sweep(
        name=clean(submission.name) or f"{subject} by {search_space.name_of(checked.space)}"[:100],
        owner_id=user.id,
        project=project,
        recipe=submission.recipe,
        command=checked.command or None,
        config=checked.config,
        space=checked.space,
        kind=submission.kind,
        pruner=pruning.to_stored(submission.pruner, is_recipe=bool(submission.recipe)),
        metric=submission.metric,
        goal=checked.goal,
        seed=submission.seed,
        runs_total=checked.runs,
        at_once=submission.at_once,
        tags=submission.tags,
        priority=submission.priority,
        preemptible=submission.preemptible,
        nodes=submission.nodes,
        devices_per_node=submission.devices_per_node,
        status=RUNNING,
        idempotency_key=idempotency_key,
        request_hash=request_hash if idempotency_key else None,
    )
    session.add(sweep)
    session.flush()
    _continue(session, sweep)
    return sweep


def extend(
    session: Session,
    sweep_id: int,
    user: User,
    *,
    runs: int | None = None,
    space: SpaceGiven | None = None,
) -> Sweep:
    """Add runs to a sweep; to a grid, values to its settings. Raises Invalid, Conflict."""
    sweep = lock(session, sweep_id)
    _check_may_submit(session, user, sweep)
    if sweep.status not in (RUNNING, PAUSED):
        text = f"Sweep {sweep_id} is {sweep.status}: only a running or paused one can be extended."
        raise Conflict(text)
    if bool(runs) == bool(space) or (space and sweep.kind != GRID):
        allowed = "either space, with more values, or runs" if sweep.kind == GRID else "only runs"
        raise Invalid({"runs": f"{runs} and space {str(space)[:100]}; allowed: {allowed}"})
    if space:
        _widen(session, sweep, space)
    else:
        _lengthen(sweep, runs or 0)
    sweep.revision += 1
    session.flush()
    _continue(session, sweep)
    return sweep


def _lengthen(sweep: Sweep, runs: int) -> None:
    most = search_space.grid_size(sweep.space) if sweep.kind == GRID else _most_runs(sweep)
    if not 1 <= runs <= most - sweep.runs_total:
        text = f"{runs} is not valid; the sweep has {sweep.runs_total} runs; allowed: {most} in all"
        raise Invalid({"runs": text})
    sweep.runs_total += runs


def _widen(session: Session, sweep: Sweep, searches: SpaceGiven) -> None:
    """Add values to settings of a grid, and a run for each new point."""
    if sweep.is_for_agents:
        schema = _guess_schema(searches)
    elif sweep.command is None:
        schema = workers.recipe(session, sweep.recipe)["schema"]
    else:
        schema = command_lines.schema(sweep.command["parameters"])
    added, errors = _read(schema, searches, GRID, is_command=sweep.command is not None)
    errors |= _check_searched(session, searches)
    for path in added.keys() - sweep.space.keys():
        known = ", ".join(sweep.space)
        errors[path] = f"not searched by this sweep; allowed: {known}"
    space = dict(sweep.space)
    for path, search in added.items():
        if path in space:
            old = space[path]["values"]
            new = [value for value in search["values"] if value not in old]
            space[path] = space[path] | {"values": old + new}
    size, before = search_space.grid_size(space), search_space.grid_size(sweep.space)
    if not errors and size == before:
        errors["space"] = "the sweep already has these values; allowed: other values"
    if size > MOST_RUNS:
        errors["space"] = f"the grid would have {size:,} points; allowed: {MOST_RUNS:,} at most"
    if errors:
        raise Invalid(errors)
    sweep.space = space
    sweep.runs_total += size - before


def _check_may_submit(session: Session, user: User, sweep: Sweep) -> None:
    """Check that the user who changes a sweep may queue its runs. Raises Invalid."""
    if sweep.command is not None and (wrong := check_commands(session, user)):
        raise Invalid(wrong)


def resume(session: Session, sweep_id: int, user: User) -> None:
    """Resume a paused or failed sweep. Raises Conflict, Invalid."""
    sweep = lock(session, sweep_id)
    _check_may_submit(session, user, sweep)
    sweeps.resume(sweep)
    session.flush()
    _continue(session, sweep)


def retry(session: Session, sweep_id: int, user: User) -> None:
    """Run the failed points of a sweep again, as new runs. Raises Conflict, Invalid."""
    sweep = lock(session, sweep_id)
    _check_may_submit(session, user, sweep)
    if sweep.status not in (RUNNING, PAUSED):
        text = f"Sweep {sweep_id} is {sweep.status}: only a running or paused one can be retried."
        raise Conflict(text)
    sweeps.retry_failed(session, sweep)
    _continue(session, sweep)


def continue_sweep(session: Session, sweep_id: int) -> None:
    """Record ended trials, and submit runs up to the concurrency limit.

    Raises Invalid, or another error of the submission.
    """
    _continue(session, lock(session, sweep_id))


def lock(session: Session, sweep_id: int) -> Sweep:
    """Return a sweep and its project, locked until the commit."""
    projects.lock_within(session, Sweep, sweep_id)
    return sweeps.get(session, sweep_id, lock=True)


def _continue(session: Session, sweep: Sweep) -> None:
    if sweep.pruner:
        pruning.prune_weak(session, sweep)
    under_way = sweeps.settle(session, sweep)
    if sweep.status != RUNNING or sweep.is_for_agents:
        return
    missing = min(sweep.at_once - under_way, PER_TRANSACTION)
    again = sweeps.waiting(session, sweep, limit=max(missing, 0))
    owner = session.get_one(User, sweep.owner_id)
    for _ in range(min(missing, len(again) + sweep.runs_total - sweep.submitted)):
        if not quotas.has_room(session, owner, sweep.project):
            return  # the next poll tries again
        trial = again.pop(0) if again else None
        point = trial.params if trial else next_point(session, sweep)
        run = submit(session, owner, _submission(sweep, None, point))
        if trial:
            sweeps.run_again(session, sweep, trial, run)
        else:
            sweeps.add(session, sweep, run, point)


def next_point(session: Session, sweep: Sweep) -> dict[str, object]:
    """Return the point of a sweep's next trial."""
    if sweep.kind == GRID:
        tried = sweeps.params(session, sweep.id)
        return next(point for point in search_space.grid(sweep.space) if point not in tried)
    trials = sweeps.all_trials(session, sweep)
    return optuna_study.suggest(sweep.space, sweep.kind, sweep.goal, sweep.seed, trials)


def submit_due(database: Database, queued_per_user: int = 0) -> None:
    """Continue every sweep that has work; one that fails does not affect others.

    queued_per_user: limit of queued runs per user; 0 means none.
    """
    with database.read_only() as session:
        due = sweeps.due(session)
    for sweep_id in due:
        _continue_or_fail(database, sweep_id, queued_per_user)


def _continue_or_fail(database: Database, sweep_id: int, queued_per_user: int) -> None:
    try:
        with database.writing() as session:
            quotas.allow(session, queued_per_user=queued_per_user)
            continue_sweep(session, sweep_id)
    except Exception as error:
        if is_outage(error):
            raise
        if not isinstance(error, HalfstepError):
            logger.exception("sweep %d failed", sweep_id)
        with database.writing() as session:
            text = str(error) if isinstance(error, HalfstepError) else BROKEN
            sweeps.fail(session, sweep_id, text)
