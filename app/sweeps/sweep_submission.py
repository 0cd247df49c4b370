"""Submission of sweeps and of their runs; the holder of a sweep's row lock submits.

The server polls all sweeps every second; a request that changes one continues it at once. Either
may be killed, or run twice, at any moment: see db.sweeps.sweeps.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from app.http.parameters import LARGEST_INTEGER, flaw
from app.submission import command_lines, config_schema
from app.submission.command_lines import Command, Parameter
from app.submission.config_schema import Schema
from app.submission.submission import LENGTHS, Submission, check_commands, submit, usual_project
from app.submission.submission import check as check_run
from app.sweeps import hyperband, search_space, tpe
from app.sweeps.search_space import BY_OPTUNA, GRID, KINDS, TPE, Space
from app.telemetry import metric_direction
from db.access import permissions, projects
from db.database import Database, is_outage
from db.errors import Conflict, HalfstepError, Invalid, NotFound
from db.names import cleaned
from db.queue import quotas, workers
from db.queue.idempotency import hash_of_request, made_by
from db.sweeps import sweeps
from db.sweeps.sweeps import HYPERBAND, LOSS, MAXIMISE, MINIMISE, PAUSED, RUNNING
from db.tables import Sweep, User
from halfstep.cli import command_line

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
MOST_AT_ONCE = 100
#: Of a random or a TPE search, if nobody says.
USUAL_RUNS = 20
#: Runs that one transaction submits: on SQLite everybody else waits for it.
PER_LOOK = 10
METRIC_CHARACTERS = 200
BROKEN = "The server failed at this sweep. What it says of it is in its log."

SpaceGiven = dict[str, str | list[Any] | dict[str, Any]]


class SweepSubmission(BaseModel):
    """A sweep to begin: runs of a recipe or a command that differ in the settings of its space.

    Missing settings get the default of the recipe or parameter.
    """

    model_config = ConfigDict(extra="forbid")

    recipe: Annotated[str, Field(description="Name of a recipe that a worker offers")] = ""
    command: Annotated[Command | None, Field(description="Instead of a recipe")] = None
    config: Annotated[dict[str, Any], Field(description="What all of its runs have")] = {}
    space: Annotated[
        SpaceGiven,
        Field(
            description="By path of a setting (training.lr), of a command by placeholder, what is "
            f"tried: a list of values, or a text: {search_space.NOTATION}"
        ),
    ]
    kind: Annotated[
        str,
        Field(description=f"{', '.join(KINDS)}; the last two by Optuna; no hyperband of a command"),
    ] = GRID
    metric: Annotated[str, Field(description="What is compared: its last value, or loss")] = LOSS
    goal: Annotated[
        str, Field(description="minimise or maximise; empty: as the metric's name has it")
    ] = ""
    runs: Annotated[
        int | None, Field(description="How many in all; null: every point of a grid, or 20")
    ] = None
    at_once: Annotated[int, Field(description="How many of them may wait or train")] = 1
    seed: Annotated[int, Field(description="What is drawn depends on it")] = 0
    name: str = ""
    tags: str = ""
    project: Annotated[str | None, Field(description="Null: the first you may submit to")] = None
    priority: int = 0
    nodes: int = 1
    devices_per_node: int = 1


class Checked(NamedTuple):
    """What is to be begun.

    command: as it is kept, empty of a recipe.  config: what all runs have.  runs: how many.
    errors: what is wrong, by path of the field.
    """

    command: dict[str, Any]
    config: dict[str, Any]
    space: Space
    goal: str
    runs: int
    errors: dict[str, str]


def check(session: Session, user: User, given: SweepSubmission) -> Checked:
    """Validate a sweep; return what to run and the errors."""
    errors = _check_plan(given)
    if given.command is not None:
        given = given.model_copy(update={"command": _declared(given.command, given.space)})
    schema, wrong = _schema(session, user, given)
    errors |= wrong
    if wrong and not schema:
        return Checked({}, {}, {}, "", 0, errors)
    space, wrong = _read(schema, given.space, given.kind, is_command=given.command is not None)
    wrong |= _check_searched(session, given.space)
    if errors | wrong:
        return Checked({}, {}, space, "", 0, errors | wrong)
    point = (
        next(search_space.grid(space))
        if given.kind == GRID
        else search_space.drawn(space, given.seed, 1)
    )
    first = check_run(session, _submission(given, schema, point))
    runs, wrong = _count(given, space)
    goal, unknown = _goal(given, first.config)
    errors = first.errors | wrong | unknown
    return Checked(first.command, first.config, space, goal, runs, errors)


def _check_searched(session: Session, space: SpaceGiven) -> dict[str, str]:
    """Refuse a search over initial weights with a token of one project.

    Later runs of a sweep are submitted with the owner's permissions, which may be wider.
    """
    grants = permissions.limits(session)
    if grants is None or grants.only is None:
        return {}
    text = "a token of one project does not search weights; allowed: one value, in config"
    return {path: text for path in space if path.partition(".")[0] == "weights"}


def _declared(command: Command, space: SpaceGiven) -> Command:
    """Return a command with a declared type for each searched placeholder."""
    try:
        names = command_line.placeholders(command.line)
    except ValueError:
        return command  # which is refused for its line
    searched = {name: space[name] for name in names if name in space}
    guessed = {name: Parameter(**search_space.guessed(each)) for name, each in searched.items()}
    return command.model_copy(update={"parameters": guessed | command.parameters})


def _schema(session: Session, user: User, given: SweepSubmission) -> tuple[Schema, dict[str, str]]:
    """Return the schema of the runs, empty if unknown, and errors."""
    if given.command is None:
        return _schema_of_recipe(session, given)
    if given.recipe:
        return {}, {"recipe": f"{given.recipe[:100]!r} and a command; allowed: one of the two"}
    if wrong := check_commands(session, user):
        return {}, wrong
    devices = given.devices_per_node
    kept, _, wrong = command_lines.check(session, given.command, given.config, devices)
    searched = {f"config.{name}" for name in given.space}
    wrong = {path: text for path, text in wrong.items() if path not in searched}
    is_known = bool(kept["parameters"]) and all(path.startswith("config.") for path in wrong)
    return command_lines.schema(kept["parameters"]) if is_known or not wrong else {}, wrong


def _schema_of_recipe(session: Session, given: SweepSubmission) -> tuple[Schema, dict[str, str]]:
    if not given.recipe:
        return {}, {"recipe": "Field required, or a command"}
    try:
        schema = workers.recipe(session, given.recipe)["schema"]
    except NotFound as error:
        return {}, {"recipe": str(error)}
    return schema, config_schema.mistakes(schema, config_schema.with_defaults(schema, given.config))


def _read(
    schema: Schema, given: SpaceGiven, kind: str, *, is_command: bool
) -> tuple[Space, dict[str, str]]:
    """Return the space, and what is wrong with it: a placeholder may be called as a field is."""
    space, errors = search_space.read(schema, given, kind)
    if not is_command:
        return space, errors
    known = schema["properties"]
    told = {f"space.{path}" if path in known else path: text for path, text in errors.items()}
    for name in given.keys() - known.keys():
        told.pop(name[:100], None)
        allowed = ", ".join(known) or "none, for it has no placeholder"
        told[f"space.{name[:100]}"] = f"the line has no such placeholder; allowed: {allowed}"
    return space, told


def _check_plan(given: SweepSubmission) -> dict[str, str]:
    errors = {}
    if given.kind not in KINDS:
        errors["kind"] = f"{given.kind[:100]!r} is not allowed; allowed: {', '.join(KINDS)}"
    elif given.kind in BY_OPTUNA and not tpe.is_installed():
        errors["kind"] = tpe.NEEDED
    elif given.kind == HYPERBAND and given.command is not None:
        allowed = ", ".join(kind for kind in KINDS if kind != HYPERBAND)
        text = f"{HYPERBAND} judges by a share of the steps, and a command does not say how many"
        errors["kind"] = f"{text}; allowed: {allowed}"
    bounds = {
        "runs": (1, _most_runs(given.kind)),
        "at_once": (1, MOST_AT_ONCE),
        "seed": (0, LARGEST_INTEGER),
    }
    for name, (low, high) in bounds.items():
        value = getattr(given, name)
        if value is not None and not low <= value <= high:
            text = f"{str(value)[:50]} is not allowed; allowed: a whole number from {low} to {high}"
            errors[name] = text
    if not given.metric or len(given.metric) > METRIC_CHARACTERS:
        text = f"it has {len(given.metric)} characters; allowed: 1 to {METRIC_CHARACTERS}"
        errors["metric"] = text
    elif wrong := flaw(given.metric):
        errors["metric"] = wrong
    if given.goal not in ("", MINIMISE, MAXIMISE):
        errors["goal"] = f"{given.goal[:100]!r} is not allowed; allowed: {MINIMISE} or {MAXIMISE}"
    return errors


def _most_runs(kind: str) -> int:
    return hyperband.MOST_RUNS if kind == HYPERBAND else MOST_RUNS


def _count(given: SweepSubmission, space: Space) -> tuple[int, dict[str, str]]:
    if given.kind != GRID:
        return given.runs or USUAL_RUNS, {}
    size = search_space.grid_size(space)
    if size > MOST_RUNS:
        text = f"the grid has {size:,} points; allowed: {MOST_RUNS:,} at most"
        return 0, {"space": text}
    return min(given.runs or size, size), {}


def _goal(given: SweepSubmission, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    if given.goal:
        return given.goal, {}
    is_low = metric_direction.lowest(given.metric, [config])
    if is_low is None:
        text = f"nobody says which way {given.metric[:100]!r} is better"
        return "", {"goal": f"{text}; allowed: {MINIMISE} or {MAXIMISE}"}
    return MINIMISE if is_low else MAXIMISE, {}


def _submission(
    sweep: SweepSubmission | Sweep, schema: Schema | None, point: dict[str, Any]
) -> Submission:
    """Return the run that tries a point. schema: where the configuration may lack groups."""
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
        nodes=sweep.nodes,
        devices_per_node=sweep.devices_per_node,
    )


def begin(
    session: Session,
    user: User,
    given: SweepSubmission,
    *,
    idempotency_key: str | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Sweep:
    """Validate and begin a sweep, or return the sweep of the same idempotency key.

    known: errors that are already known.  Raises Invalid.
    """
    request_hash = hash_of_request(given.model_dump(mode="json"))
    before = made_by(session, Sweep, user, idempotency_key, request_hash)
    if before is not None:
        return before
    checked = check(session, user, given)
    if errors := {**known, **checked.errors}:
        raise Invalid(errors)
    project = usual_project(session, user) if given.project is None else given.project
    projects.hold(session, project)
    what = command_lines.default_name(given.command.line) if given.command else given.recipe
    sweep = Sweep(
        name=cleaned(given.name) or f"{what} by {search_space.name_of(checked.space)}"[:100],
        owner_id=user.id,
        project=project,
        recipe=given.recipe,
        command=checked.command or None,
        config=checked.config,
        space=checked.space,
        kind=given.kind,
        metric=given.metric,
        goal=checked.goal,
        seed=given.seed,
        runs_total=checked.runs,
        at_once=given.at_once,
        tags=given.tags,
        priority=given.priority,
        nodes=given.nodes,
        devices_per_node=given.devices_per_node,
        status=RUNNING,
        idempotency_key=idempotency_key,
        request_hash=request_hash if idempotency_key else None,
    )
    session.add(sweep)
    session.flush()
    _go_on(session, sweep)
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
    sweep = _locked(session, sweep_id)
    _see_that_may_submit(session, user, sweep)
    if sweep.status not in (RUNNING, PAUSED):
        text = f"Sweep {sweep_id} is {sweep.status}: only a running or paused one takes more runs."
        raise Conflict(text)
    if bool(runs) == bool(space) or (space and sweep.kind != GRID):
        allowed = "space, with more values, or runs" if sweep.kind == GRID else "runs, how many"
        raise Invalid({"runs": f"{runs} and space {str(space)[:100]}; allowed: one of {allowed}"})
    if space:
        _widen(session, sweep, space)
    else:
        _lengthen(sweep, runs or 0)
    sweep.revision += 1
    session.flush()
    _go_on(session, sweep)
    return sweep


def _lengthen(sweep: Sweep, runs: int) -> None:
    most = search_space.grid_size(sweep.space) if sweep.kind == GRID else _most_runs(sweep.kind)
    if not 1 <= runs <= most - sweep.runs_total:
        text = f"{runs} is not allowed; it has {sweep.runs_total} runs, and may have {most} in all"
        raise Invalid({"runs": text})
    sweep.runs_total += runs


def _widen(session: Session, sweep: Sweep, given: SpaceGiven) -> None:
    """Add values to settings of a grid, and a run for each new point."""
    if sweep.command is None:
        schema = workers.recipe(session, sweep.recipe)["schema"]
    else:
        schema = command_lines.schema(sweep.command["parameters"])
    added, errors = _read(schema, given, GRID, is_command=sweep.command is not None)
    errors |= _check_searched(session, given)
    for path in added.keys() - sweep.space.keys():
        known = ", ".join(sweep.space)
        errors[path] = f"this sweep does not search it; allowed: {known}"
    space = dict(sweep.space)
    for path, each in added.items():
        if path in space:
            old = space[path]["values"]
            space[path] = {"values": old + [value for value in each["values"] if value not in old]}
    size, before = search_space.grid_size(space), search_space.grid_size(sweep.space)
    if not errors and size == before:
        errors["space"] = "it has these values already; allowed: others"
    if size > MOST_RUNS:
        errors["space"] = f"the grid would have {size:,} points; allowed: {MOST_RUNS:,} at most"
    if errors:
        raise Invalid(errors)
    sweep.space = space
    sweep.runs_total += size - before


def _see_that_may_submit(session: Session, user: User, sweep: Sweep) -> None:
    """Check that the user who continues a sweep may queue its runs. Raises Invalid."""
    if sweep.command is not None and (wrong := check_commands(session, user)):
        raise Invalid(wrong)


def resume(session: Session, sweep_id: int, user: User) -> None:
    """Resume a paused or failed sweep. Raises Conflict, Invalid."""
    sweep = _locked(session, sweep_id)
    _see_that_may_submit(session, user, sweep)
    sweeps.resume(sweep)
    session.flush()
    _go_on(session, sweep)


def continue_run(session: Session, sweep_id: int) -> None:
    """Record ended trials, and submit runs up to the concurrency limit.

    Raises Invalid, or another error of the submission.
    """
    _go_on(session, _locked(session, sweep_id))


def _locked(session: Session, sweep_id: int) -> Sweep:
    """Return a sweep and its project, locked until the commit."""
    projects.lock_within(session, Sweep, sweep_id)
    return sweeps.get(session, sweep_id, lock=True)


def _go_on(session: Session, sweep: Sweep) -> None:
    if sweep.kind == HYPERBAND:
        if not tpe.is_installed():
            raise Invalid({"kind": tpe.NEEDED})
        hyperband.look(session, sweep)
    under_way = sweeps.settle(session, sweep)
    if sweep.status != RUNNING:
        return
    wanting = min(sweep.at_once - under_way, sweep.runs_total - sweep.submitted, PER_LOOK)
    owner = session.get_one(User, sweep.owner_id)
    for _ in range(wanting):
        if not quotas.has_room(session, owner, sweep.project):
            return  # it waits: the next look may find some
        point = _next(session, sweep)
        run = submit(session, owner, _submission(sweep, None, point))
        sweeps.add(session, sweep, run, point)


def _next(session: Session, sweep: Sweep) -> dict[str, Any]:
    number = sweep.submitted + 1
    if sweep.kind == GRID:
        tried = sweeps.params(session, sweep.id)
        return next(point for point in search_space.grid(sweep.space) if point not in tried)
    if sweep.kind == TPE:
        if not tpe.is_installed():
            raise Invalid({"kind": tpe.NEEDED})
        rows = sweeps.trials(session, sweep, limit=MOST_RUNS)
        trials = sorted((trial for trial, _run in rows), key=lambda trial: trial.number)
        return tpe.suggested(sweep.space, sweep.goal, sweep.seed, number, trials)
    return search_space.drawn(sweep.space, sweep.seed, number)


def submit_due(database: Database, queued_per_user: int = 0) -> None:
    """Continue every sweep that has work; one that fails does not affect others.

    queued_per_user: limit of queued runs per user; 0 means none.
    """
    with database.glancing() as session:
        due = sweeps.due(session)
    for sweep_id in due:
        _look_at(database, sweep_id, queued_per_user)


def _look_at(database: Database, sweep_id: int, queued_per_user: int) -> None:
    try:
        with database.writing() as session:
            quotas.allow(session, queued_per_user=queued_per_user)
            continue_run(session, sweep_id)
    except Exception as error:
        if is_outage(error):
            raise
        if not isinstance(error, HalfstepError):
            logger.exception("sweep %d failed", sweep_id)
        with database.writing() as session:
            text = str(error) if isinstance(error, HalfstepError) else BROKEN
            sweeps.fail(session, sweep_id, text)
