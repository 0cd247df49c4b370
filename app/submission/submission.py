"""Submission of runs: validates a configuration against its recipe's schema."""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.orm import Session

from app.auth import project_parameters
from app.http.parameters import LARGEST_STEP, find_outsized, flaw, flaws
from app.submission import command_lines, config_schema, forms
from app.submission.command_lines import Command
from db.access import permissions, projects
from db.access.permissions import Grants, Permission
from db.errors import Invalid, NotFound
from db.files import checkpoints, uploads
from db.names import clean
from db.queue import estimates, quotas, workers
from db.queue.idempotency import hash_of_request, made_by
from db.runs import groups, run_metadata, runs
from db.tables import LARGEST_ID, TRAIN, Run, User
from halfstep.run_config import RunConfig
from halfstep.telemetry.plain_json import JsonObject

LIMITS = {
    "priority": (-100, 100),
    "nodes": (1, 256),
    "devices_per_node": (1, 1024),
    "after_id": (1, LARGEST_ID),
    "parent_id": (1, LARGEST_ID),
    "parent_step": (1, LARGEST_STEP),
    "compared_with": (1, LARGEST_ID),
}
PriorityNumber = Annotated[int, Interval(ge=LIMITS["priority"][0], le=LIMITS["priority"][1])]
LENGTHS = {name: run_metadata.LENGTHS[name] for name in ("name", "tags")}
LENGTHS["project"] = projects.NAME_CHARACTERS


def _declare_bounded(name: str, default: object, description: str) -> Any:
    """Declare a bounded field; `check` validates it, with our error message."""
    bounds: dict[str, Any] = {}
    if name in LIMITS:
        bounds["minimum"], bounds["maximum"] = LIMITS[name]
    if name in LENGTHS:
        bounds["maxLength"] = LENGTHS[name]
    return Field(default, description=description, json_schema_extra=bounds)


class Submission(BaseModel):
    """A run to queue: a recipe or a command.

    Missing settings get the default of the recipe or parameter.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    recipe: Annotated[str, Field(description="Name of a recipe that a worker offers")] = ""
    command: Annotated[Command | None, Field(description="Instead of a recipe")] = None
    config: dict[str, Any] = {}
    """Values by the recipe's JSON Schema; for a command, values by placeholder"""
    name: str = _declare_bounded(
        "name", "", "Empty: derived from recipe and precision, its parent, or the script"
    )
    tags: str = _declare_bounded("tags", "", "Separated by commas")
    project: str | None = _declare_bounded(
        "project", None, "Null: that of its parent run, or else the first one with permission"
    )
    priority: int = _declare_bounded("priority", 0, "Higher starts sooner")
    preemptible: bool = False
    """Whether a waiting run of higher priority may take its devices: it saves a checkpoint, returns
    to the queue and resumes exactly. Only for recipes that train"""
    nodes: int = _declare_bounded("nodes", 1, "Number of workers")
    devices_per_node: int = _declare_bounded(
        "devices_per_node", 1, "Number of devices of each node"
    )
    after_id: int | None = _declare_bounded("after_id", None, "Start after the end of this run")
    parent_id: int | None = _declare_bounded(
        "parent_id", None, "Start from a checkpoint of this run"
    )
    parent_step: int | None = _declare_bounded("parent_step", None, "Step of that checkpoint")
    compared_with: int | None = _declare_bounded(
        "compared_with", None, "Compare with this run, in a group"
    )


def submit(
    session: Session,
    user: User,
    submission: Submission,
    *,
    idempotency_key: str | None = None,
    request: Mapping[str, object] | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Validate and queue a run, or return the run of the same idempotency key.

    request: the request with the key, if it is not the submission.  known: errors that are already
    known.  Raises Invalid, OverQuota.
    """
    request_hash = hash_of_request(request or submission.model_dump(mode="json"))
    before = made_by(session, Run, user, idempotency_key, request_hash)
    if before is not None:
        return before
    checked = check(session, submission)
    errors = {**known, **checked.errors}
    if submission.command is not None:
        errors |= check_commands(session, user)
    grants = permissions.limits(session)
    if grants is None:  # the server submits a run of a sweep
        grants = permissions.grants(session, user)
        errors |= project_parameters.errors_of(
            session, grants, submission.project or projects.DEFAULT
        )
        errors |= check_sources(session, grants, submission, checked.config)
    if errors:
        raise Invalid(errors)
    project = _project(session, grants, submission)
    projects.lock_shared(session, project)
    quotas.check_submission(session, user, project)
    name = clean(submission.name)
    options: dict[str, object] = {
        "config": checked.config,
        "tags": ", ".join(filter(None, map(clean, submission.tags.split(",")))),
        "project": project,
        "priority": submission.priority,
        "preemptible": submission.preemptible,
        "devices_per_node": submission.devices_per_node,
        "after_id": submission.after_id,
        "idempotency_key": idempotency_key,
        "request_hash": request_hash if idempotency_key else None,
    }
    if submission.command is not None:
        name = name or command_lines.default_name(submission.command.line)
        return runs.submit(session, user, Run(command=checked.command, name=name, **options))
    options |= {"parent_id": submission.parent_id, "parent_step": submission.parent_step}
    parent = session.get(Run, submission.parent_id) if submission.parent_id is not None else None
    is_fork = config_schema.get(checked.config, "lab.task", TRAIN) == TRAIN
    if parent and is_fork and submission.parent_step is not None:
        name = name or name_of_fork(parent.name, submission.parent_step)
    recipe = _recipe_name(session, submission)
    expected = _estimate_seconds(session, submission, recipe, checked.config)
    options |= {"nodes": submission.nodes, "expected_seconds": expected}
    run = runs.submit(session, user, Run(recipe=recipe, name=name, **options))
    if submission.compared_with is not None:
        groups.join(session, run, submission.compared_with)
    return run


def name_of_fork(name: str, step: int) -> str:
    """Return a name for a run that starts from a step of another."""
    ending = f" from step {step}"
    return re.sub(r" from step \d+$", "", name)[: LENGTHS["name"] - len(ending)] + ending


def _estimate_seconds(
    session: Session, submission: Submission, recipe: str, config: JsonObject
) -> float | None:
    """Return the time of the slowest similar run; None if there is none."""
    training = config["training"]
    if config.get("lab", {}).get("task", TRAIN) != TRAIN:
        return None
    if training.get("epochs") is not None:
        return None  # the number of steps is unknown before the data is read
    sizes = {
        name: forms.input_text(value)
        for name, value in config.get("recipe", {}).items()
        if not isinstance(value, float)
    }
    similar = estimates.alike(
        session,
        recipes={recipe, submission.recipe},
        precision=config["precision"],
        nodes=submission.nodes,
        devices_per_node=submission.devices_per_node,
        batch_size=training.get("batch_size"),
        has_same_sizes=lambda settings: same_sizes(settings, sizes),
    )
    if not (similar.same_sizes and similar.same_batch_size):
        return None
    return float(training["steps"] - (submission.parent_step or 0)) / similar.slowest


def same_sizes(settings: JsonObject, requested: Mapping[str, str]) -> bool:
    """Return whether settings equal the requested ones in every size that both have.

    Rates and fractions are not sizes.
    """
    return all(
        isinstance(value, float) or requested.get(name) in (None, forms.input_text(value))
        for name, value in settings.items()
    )


def check_commands(session: Session, user: User) -> dict[str, str]:
    """Return an error if the user or token may not queue command lines."""
    grants = permissions.limits(session)
    is_whole = grants is None or (grants.most == frozenset(Permission) and grants.only is None)
    if not is_whole:
        allowed = "allowed: a recipe, or a token with full access to all projects"
        return {"command": f"this token cannot queue command lines; {allowed}"}
    if user.is_admin or user.runs_commands:
        return {}
    text = "command lines require a separate permission, which an admin grants"
    return {"command": f"{text}; allowed: a recipe"}


def _project(session: Session, grants: Grants, submission: Submission) -> str:
    """Return the project of a run: by default its parent's, or the first allowed one."""
    if submission.project is not None:
        return submission.project
    if submission.parent_id is not None:
        parent = session.get(Run, submission.parent_id)
        return parent.project if parent is not None else projects.DEFAULT
    return _first(session, grants)


def usual_project(session: Session, user: User) -> str:
    """Return a user's default project."""
    return _first(session, permissions.limits(session) or permissions.grants(session, user))


def _first(session: Session, grants: Grants) -> str:
    return next(iter(may_submit_to(session, grants)), projects.DEFAULT)


def most_priority(session: Session, project: str, priority: int) -> int:
    """Return a priority, lowered to the default for users who may not prioritize."""
    grants = permissions.limits(session)
    may = grants is None or grants.may(Permission.PRIORITIZE_RUN, project)
    return priority if may else min(priority, 0)


def _check_permissions(
    session: Session, grants: Grants, submission: Submission, config: JsonObject
) -> dict[str, str]:
    """Return errors for parts of a run that the user has no permission for."""
    project = _project(session, grants, submission)
    errors = project_parameters.errors_of(session, grants, project)
    if submission.priority > 0 and not grants.may(Permission.PRIORITIZE_RUN, project):
        allowed = "allowed: at most 0 without permission to prioritize runs of this project"
        errors["priority"] = f"{submission.priority} is not valid; {allowed}"
    return errors | check_sources(session, grants, submission, config)


def check_sources(
    session: Session, grants: Grants, submission: Submission, config: JsonObject
) -> dict[str, str]:
    """Return errors of the files that a run starts from, and of the run it is compared with.

    The user must have permission to download these files.
    """
    if submission.command is not None:
        return {}
    errors = {}
    weights = config.get("weights", {})
    sources = {
        "parent_id": submission.parent_id,
        "weights.run": weights.get("run"),
    }
    for field, run_id in sources.items():
        source = session.get(Run, run_id) if run_id is not None else None
        if source is not None and not grants.may(Permission.DOWNLOAD_FILES, source.project):
            errors[field] = f"you have no permission to download files of the project of {run_id}"
    upload = weights.get("upload")
    if upload is not None and not uploads.may_download(session, grants, upload):
        errors[uploads.SETTING] = uploads.NOT_YOURS.format(upload)
    compared_id = submission.compared_with
    compared = session.get(Run, compared_id) if compared_id is not None else None
    if compared is not None and not grants.may(Permission.SUBMIT_RUN, compared.project):
        text = f"you have no permission to submit to the project of run {compared_id}"
        errors["compared_with"] = f"{text}; allowed: a run of a project with permission"
    return errors


def may_submit_to(session: Session, grants: Grants) -> list[str]:
    """Return the projects to which the user may submit."""
    return project_parameters.list_permitted(session, grants, Permission.SUBMIT_RUN)


def _recipe_name(session: Session, submission: Submission) -> str:
    """Return the declared name of the run's recipe if the submission has its path.

    A run of an earlier version has the path, and so have its forks and comparisons.
    """
    offered = workers.recipe(session, submission.recipe)
    related_id = submission.parent_id or submission.compared_with
    related = session.get(Run, related_id) if related_id is not None else None
    if related is not None and related.recipe == offered.get("reference"):
        return related.recipe
    return str(offered["name"])


class Checked(NamedTuple):
    """A validated submission."""

    command: JsonObject
    config: JsonObject  # complete and parsed
    errors: dict[str, str]  # by path of the field


def check(session: Session, submission: Submission) -> Checked:
    """Validate a submission; return what to queue and the errors."""
    if submission.command is None:
        command: JsonObject = {}
        config, errors = _check_recipe(session, submission)
    else:
        devices = submission.devices_per_node
        command, config, errors = command_lines.check(
            session, submission.command, submission.config, devices
        )
        if submission.recipe:
            errors["recipe"] = f"{submission.recipe[:100]!r} and a command; allowed: one of the two"
        if submission.parent_id is not None:
            errors["parent_id"] = "a command cannot start from a checkpoint; allowed: for recipes"
        if submission.nodes > 1:
            text = f"{submission.nodes} is not valid; allowed: 1 node for a command"
            errors["nodes"] = text
        if submission.compared_with is not None:
            text = "a command cannot be compared in a group; allowed: for recipes"
            errors["compared_with"] = text
    errors |= _check_measurement(submission, config)
    is_training = config_schema.get(config, "lab.task", TRAIN) == TRAIN
    if submission.preemptible and (submission.command is not None or not is_training):
        text = "true is not valid; allowed: for trainings, since others would start again"
        errors["preemptible"] = text
    if any(path in errors for path in ("recipe", "config")):
        return Checked(command, config, errors)  # further checks would add misleading errors
    errors |= _check_place(session, submission)
    grants = permissions.limits(session)
    if grants is not None and not errors.keys() & {"parent_id", "project", "priority"}:
        errors |= _check_permissions(session, grants, submission, config)
    return Checked(command, config, errors)


def _check_recipe(
    session: Session, submission: Submission
) -> tuple[dict[str, Any], dict[str, str]]:
    if not submission.recipe:
        return {}, {"recipe": "Field required, or a command"}
    if wrong := flaw(submission.recipe):
        return {}, {"recipe": wrong}
    try:
        schema = workers.recipe(session, submission.recipe)["schema"]
    except NotFound as error:
        return {}, {"recipe": str(error)}
    config = config_schema.with_defaults(schema, submission.config)
    if errors := find_outsized(config):
        return config, errors | config_schema.beyond(schema, config, errors)
    errors = config_schema.mistakes(schema, config) | flaws(config)
    if not errors:
        config = config_schema.parse(schema, config)
        if errors := find_outsized(config):
            return config, errors
    if not any(path.startswith("weights") for path in errors):
        errors |= _find_weights(session, config)
    return config, errors | _contradictions(config, errors)


def _contradictions(config: JsonObject, known: Mapping[str, str]) -> dict[str, str]:
    """Return errors of contradictory settings, on which a worker would fail.

    The schema detects all other errors. A group's first error hides its others, and errors of
    groups hide those between groups; so each setting with an error is left out until no other one
    has any. An error that names one of these settings depends on it, and is left out, too.
    known: the errors so far, by path.
    """
    errors: dict[str, str] = {}
    while True:
        wrong = known.keys() | errors
        names = {*wrong, *(path.rpartition(".")[2] for path in wrong)}
        found = {
            path: text
            for path, text in _contradictions_of(_without(config, wrong)).items()
            if path not in wrong and names.isdisjoint(_NAME.findall(text))
        }
        if not found:
            return errors
        errors |= found


def _without(config: JsonObject, paths: Collection[str]) -> JsonObject:
    """Return a copy without the settings, or groups of them, at the paths."""
    copy = deepcopy(config)
    for path in paths:
        *groups, name = path.split(".")
        above: object = copy
        for group in groups:
            above = above.get(group) if isinstance(above, dict) else None
        if isinstance(above, dict):
            above.pop(name, None)
    return copy


#: A setting in a message: floor, training.weights.
_NAME = re.compile(r"\w+(?:\.\w+)*")


def _contradictions_of(config: JsonObject) -> dict[str, str]:
    try:
        RunConfig[Any].model_validate({"recipe": {}} | config)
    except ValidationError as error:
        return dict(
            _find_blamed(config, flaw["loc"], str(flaw["ctx"]["error"]))
            for flaw in error.errors()
            if flaw["type"] == "value_error"
        )
    return {}


def _find_blamed(config: JsonObject, group: tuple[int | str, ...], message: str) -> tuple[str, str]:
    """Return the setting or group that a message begins with, and the message."""
    path = [*map(str, group), *message.split(maxsplit=1)[0].split(".")]
    value: Any = config
    for part in path:
        value = value.get(part, path) if isinstance(value, dict) else path
    return ".".join(path if value is not path else path[:1]), message


def _find_weights(session: Session, config: JsonObject) -> dict[str, str]:
    """Return errors of the initial weights; resolve "newest" to a step."""
    weights = config.get("weights", {})
    run_id, step = weights.get("run"), weights.get("step")
    sources = {name: weights.get(name) for name in ("path", "upload", "run")}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        text = " and ".join(f"{name} {str(sources[name])[:100]}" for name in given)
        return {f"weights.{given[0]}": f"{text}; allowed: one of {', '.join(sources)}"}
    if step is not None and run_id is None:
        return {"weights.step": f"{step} has no effect without run, the run of the checkpoint"}
    if run_id is None:
        return {}
    source = session.get(Run, run_id)
    is_deleted = source is not None and source.deleted_at is not None
    files = [] if is_deleted or source is None else checkpoints.weights_at(session, run_id, step)
    if is_deleted:
        return {"weights.run": f"run {run_id} is deleted; allowed: a run that is not deleted"}
    if not files:
        at = "" if step is None else f" at step {step:,}"
        return {"weights.run": f"run {run_id} has saved no weights{at}"}
    weights["step"] = files[0].step
    return {}


def _check_measurement(submission: Submission, config: JsonObject) -> dict[str, str]:
    """Return errors of a run that measures instead of training."""
    lab = config.get("lab")
    if submission.command is not None or not isinstance(lab, dict):
        return {}
    task, errors = lab.get("task", TRAIN), {}
    for name in ("nodes", "devices_per_node"):
        if task != TRAIN and getattr(submission, name) > 1:
            value = getattr(submission, name)
            errors[name] = f"{value} is not valid; allowed: 1 with lab.task {task}"
    steps = lab.get("checkpoints")
    if steps and isinstance(steps, list) and (task == TRAIN or submission.parent_id is None):
        text = f"{', '.join(map(str, steps))[:100]} has no effect without"
        what = "lab.task" if task == TRAIN else "parent_id, the run of the checkpoints"
        errors["lab.checkpoints"] = f"{text} {what}"
    return errors


def _check_place(session: Session, submission: Submission) -> dict[str, str]:
    """Return errors of the fields that every run has."""
    errors = {}
    for name, (low, high) in LIMITS.items():
        value = getattr(submission, name)
        if value is not None and not low <= value <= high:
            errors[name] = f"{value} is not valid; allowed: a whole number from {low} to {high}"
    for name, most in LENGTHS.items():
        text = getattr(submission, name) or ""
        if len(text) > most:
            errors[name] = f"it has {len(text)} characters; allowed: at most {most}"
        elif wrong := flaw(text):
            errors[name] = wrong
    if submission.parent_step is not None and submission.parent_id is None:
        message = f"{submission.parent_step} has no effect without parent_id"
        errors.setdefault("parent_step", f"{message}, the run of the checkpoint")
    after_id = submission.after_id
    if (
        after_id is not None
        and "after_id" not in errors
        and not runs.with_owners(session, [after_id])
    ):
        errors["after_id"] = f"there is no run {after_id}"
    return errors
