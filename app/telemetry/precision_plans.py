"""Precision plans and diffs of checkpoints, each measured by a run of its own."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Annotated, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.compare import comparison
from app.http.parameters import Body, DocumentedModel, Step
from app.runs.summary import Number
from app.submission.submission import LENGTHS, Submission, most_priority, submit
from db.errors import Conflict, Invalid
from db.files import checkpoints
from db.files.checkpoints import list_measured_steps
from db.runs import groups, runs
from db.tables import PRECISION_DIFF, PRECISION_PLAN, RECIPE, TRAIN, Run, User
from db.telemetry.stored_events import StoredEvents
from halfstep.number_formats import count
from halfstep.precision_lab.plan_event import plan_from
from halfstep.precision_lab.plan_result import PlanPoint as PlannedPoint
from halfstep.precision_lab.plan_result import PrecisionPlan as Plan
from halfstep.telemetry import events
from halfstep.telemetry.plain_json import JsonObject

MOST_CHECKPOINTS = 3
#: Points of a plan that are compared over seeds, in addition to fp32.
BEST = 3


class Measurement(Body):
    """A plan or diffs of checkpoints of a run."""

    task: Literal["precision_plan", "precision_diff"]
    checkpoints: list[Step] = Field(
        [],
        max_length=MOST_CHECKPOINTS,
        description="Their steps; default: for a plan the first, a middle and the last one, for a "
        "diff the last one",
    )
    fresh_weights: Annotated[bool, Field(description="Plan with initial weights as well")] = True
    batches: Annotated[int, Field(ge=1, le=4)] = 2
    """Batches of a plan per set of weights"""
    max_error: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Largest relative error of the gradient in a plan"""
    min_cosine: Annotated[float, Field(ge=-1, le=1)] = 0.99
    """Smallest cosine similarity of the gradient in a plan"""


class PlanPoint(DocumentedModel):
    """A mix of precisions, and what was measured with it."""

    label: Annotated[str, Field(description="In words")]
    precision: Annotated[str, Field(description="fp16, bf16 or fp32")]
    fp32: Annotated[list[str], Field(description="Modules in fp32, by name or pattern")]
    bf16: Annotated[list[str], Field(description="Modules in bf16, by name or pattern")]
    is_loss_in_fp32: Annotated[bool, Field(description="Needs a change of the loss function")]
    init_scale: Annotated[Number, Field(description="Loss scale of fp16; null: none")]
    error: Number
    """Error of the whole gradient, the worst of all batches"""
    by_weights: Annotated[dict[str, Number], Field(description="The same by weights")]
    cosine: Annotated[Number, Field(description="The smallest of all batches")]
    is_within: Annotated[bool, Field(description="Whether it is within the bounds")]
    time: Number
    """Time of a forward and a backward pass relative to fp32"""
    memory: Number
    """Memory of a forward pass's results relative to fp32"""
    ms: Annotated[Number, Field(description="Time by CUDA events; null: not measured")]
    config: Annotated[JsonObject, Field(description="Settings of a run")]


class PlanModule(BaseModel):
    """Modules of one type and role: what they cost, and the error that they cause alone."""

    role: Annotated[str, Field(description="Name, with * for numbers; (loss): the loss function")]
    names: list[str]
    type: str
    errors: Annotated[dict[str, Number], Field(description="By precision")]
    operations: Annotated[Number, Field(description="Share of the model's")]
    memory: Annotated[Number, Field(description="Share of the bytes of all results")]
    ms: Annotated[Number, Field(description="What fp32 adds to a forward pass; null: unknown")]


class PrecisionPlan(BaseModel):
    """The fastest mixes of precisions within a bound of the gradient's error."""

    sentences: list[str]
    best: Annotated[int, Field(description="Index of the best point")]
    points: Annotated[list[PlanPoint], Field(description="The Pareto front, the fastest first")]
    of_precision: Annotated[dict[str, PlanPoint], Field(description="The best of fp16 and bf16")]
    modules: Annotated[list[PlanModule], Field(description="The largest error first")]
    max_error: Number
    min_cosine: Number
    batches: int
    cost: Annotated[str, Field(description="measured, by CUDA events, or counted operations")]
    device: str
    fp32_cost: Annotated[Number, Field(description="Assumed for counted operations; or null")]
    batch_deviation: Annotated[Number, Field(description="Of the batches' gradients; or null")]
    notes: list[str]


class PlanOfRun(BaseModel):
    """The precision plan that a run has measured."""

    plan: Annotated[PrecisionPlan | None, Field(description="Null: it has not, or not yet")]


def request(session: Session, user: User, run: Run, wanted: Measurement) -> Run:
    """Queue the measurement of a run's checkpoints. Raises Conflict, Invalid, OverQuota."""
    runs.check_has_recipe(run, "be measured")
    if run.task != TRAIN:
        raise Conflict(f"Run {run.id} does not train: measure the run that it belongs to.")
    steps = _steps(session, run, wanted)
    config = deepcopy(run.config)
    config["lab"] = {
        "task": wanted.task,
        "checkpoints": list(map(str, steps)),
        **wanted.model_dump(exclude={"task", "checkpoints"}),
    }
    if wanted.task == PRECISION_DIFF or not wanted.fresh_weights:
        config.pop("weights", None)
    ending = f" {wanted.task.replace('_', ' ')}"
    submission = Submission(
        recipe=run.recipe,
        config=config,
        name=run.name[: LENGTHS["name"] - len(ending)] + ending,
        tags=run.tags,
        project=run.project,
        priority=most_priority(session, run.project, run.priority),
        parent_id=run.id if steps else None,
        parent_step=steps[-1] if steps else None,
    )
    return submit(session, user, submission)


def _steps(session: Session, run: Run, wanted: Measurement) -> list[int]:
    """Return the steps of the checkpoints to measure. Raises Conflict, Invalid."""
    saved = checkpoint_steps(session, run.id)
    if unknown := [step for step in wanted.checkpoints if step not in saved]:
        has = f"has them at {', '.join(map(str, saved))[:500]}" if saved else "has none"
        raise Invalid({"checkpoints": f"{unknown[0]} is not valid; run {run.id} {has}"})
    if not saved and (wanted.task == PRECISION_DIFF or not wanted.fresh_weights):
        raise Conflict(f"Run {run.id} has no checkpoint to measure.")
    is_alone = run.parent_id is None and run.nodes == run.devices_per_node == 1
    if not saved and not is_alone:  # no parent would say what the plan's runs need
        started = f"continues run {run.parent_id}" if run.parent_id else "uses several devices"
        raise Conflict(
            f"Run {run.id} {started} and has no checkpoint yet: measure it once it has saved one."
        )
    if wanted.checkpoints or not saved:
        return sorted(set(wanted.checkpoints))
    if wanted.task == PRECISION_DIFF:
        return saved[-1:]
    return sorted({saved[0], saved[len(saved) // 2], saved[-1]})


def checkpoint_steps(session: Session, run_id: int) -> list[int]:
    """Return the steps of a run's checkpoints, in order."""
    rows = checkpoints.of_run(session, run_id)
    return sorted(row.step for row in rows if row.kind == "checkpoint")


def of_run(session: Session, run: Run) -> Plan | None:
    """Return the plan that a run has measured; None if it has not."""
    event = StoredEvents(session, run).newest(events.PrecisionPlan)
    return None if event is None else plan_from(event)


def as_json(plan: Plan) -> PrecisionPlan:
    """Return a plan for the API."""
    return PrecisionPlan.model_validate(plan.as_dict())


def changes(point: PlannedPoint) -> JsonObject:
    """Return the settings that make a training of a plan's run, by path."""
    return {
        **groups.VARIANTS[point.precision],
        "modules.fp32": point.fp32,
        "modules.bf16": point.bf16,
        **({} if point.init_scale is None else {"scaler.init_scale": point.init_scale}),
        "lab.task": TRAIN,
        "lab.checkpoints": [],
    }


def form(run: Run, point: PlannedPoint) -> str:
    """Return the URL of the form of a run with a point's settings."""
    settings = [("set", f"{path}={json.dumps(value)}") for path, value in changes(point).items()]
    return f"/runs/new?{urlencode([('from', run.id), *settings])}"


def best_points(plan: Plan) -> list[PlannedPoint]:
    """Return the best points within the bounds that settings alone make a run of."""
    usable = [point for point in plan.points if point.is_within and not point.is_loss_in_fp32]
    return sorted(usable, key=lambda point: point.rank)[:BEST]


def queue_best(session: Session, user: User, run: Run, seeds: int) -> list[Run]:
    """Queue the best points of a run's plan, and fp32, with several seeds. Raises Conflict."""
    plan = of_run(session, run) if run.task == PRECISION_PLAN else None
    points = best_points(plan) if plan else []
    if not points:
        raise Conflict(f"Run {run.id} has no precision plan with a point within its bounds.")
    if not any(point.precision == "fp32" for point in points):
        points.append(replace(points[0], precision="fp32", fp32=[], bf16=[], init_scale=None))
    variants = [(str(point), changes(point)) for point in points]
    source, config = find_planned(session, run)
    return comparison.queue_variants(session, user, source, variants, seeds, config)


def find_planned(session: Session, run: Run) -> tuple[Run, JsonObject]:
    """Return the run that a measurement is of, or itself, and the configuration to train.

    Settings are those that were measured, and the initial weights those of the run that it is of.
    Raises NotFound if that run is deleted: what it trains from is unknown then.
    """
    config = deepcopy(run.config)
    if run.parent_id is None:
        return run, config
    source = runs.get(session, run.parent_id)
    config.pop("weights", None)
    if "weights" in source.config:
        config["weights"] = deepcopy(source.config["weights"])
    return source, config


def list_measurements(session: Session, run_id: int) -> list[Run]:
    """List the measurements of a run's checkpoints, the newest first."""
    return [fork for fork in runs.forks(session, run_id) if fork.task != TRAIN][::-1]


def describe_weights(run: Run) -> str:
    """Return the weights that a measurement is of, such as "initial weights, steps 200, 1000"."""
    steps = list_measured_steps(run) if run.parent_id else []
    is_fresh = run.task == PRECISION_PLAN and run.config["lab"].get("fresh_weights", True)
    of_steps = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(count, steps))}"
    return ", ".join(["initial weights"] * (is_fresh or not steps) + [of_steps] * bool(steps))


def is_measurable(run: Run) -> bool:
    """Return whether measurements of a run can be queued."""
    return run.source == RECIPE and run.task == TRAIN
