"""Actions for a finding that are possible now: prefilled forms of a new run."""

import json
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.http.parameters import DocumentedModel
from app.submission import config_schema
from db.errors import NotFound
from db.files import checkpoints
from db.health import findings
from db.queue import workers
from db.tables import RECIPE, Run
from halfstep.diagnosis.finding import Finding
from halfstep.number_formats import number
from halfstep.telemetry.plain_json import JsonObject

BF16, FP32 = "bf16", "fp32"
#: Factor by which a learning rate is lowered.
LOWER = 10
#: Common learning rate, and the largest usual one.
USUAL, LARGEST_USUAL = 0.001, 0.1


class Action(BaseModel):
    """A new run that may fix the problem."""

    label: str
    address: Annotated[str, Field(description="URL of the prefilled form of a new run")]
    step: Annotated[int | None, Field(description="Step of the checkpoint to start from, if any")]
    settings: Annotated[JsonObject, Field(description="Changed settings by path")]


class AdvisedFinding(DocumentedModel):
    """A finding with possible actions."""

    title: str
    text: str
    module: Annotated[str | None, Field(description="Module that a fork may run in fp32")]
    before: Annotated[int | None, Field(description="The first affected step, if known")]
    part: Annotated[str, Field(description="Section of the run's page with the evidence; or empty")]
    cause: str
    """Section in docs/reference/diagnosis.md; empty for general advice"""
    help: Annotated[str, Field(description="URL of that section; or empty")]
    fix: Annotated[str, Field(description="Code change to a script; or empty")]
    is_certain: Annotated[bool, Field(description="False: other causes are not excluded")]
    is_certain_fault: bool
    """Whether something is wrong, in contrast to a possible improvement"""
    actions: Annotated[list[Action], Field(description="Actions that are currently possible")]


def advise(session: Session, run: Run) -> list[AdvisedFinding]:
    """Return the findings about a run with their actions, which only open forms."""
    rows = findings.of_run(session, run)
    fields: dict[str, config_schema.Property] = {}
    if run.source == RECIPE and any(row.remedies or row.module for row in rows):
        fields = _fields(session, run.recipe)
    return [
        AdvisedFinding(
            title=row.title,
            text=row.text,
            module=row.module,
            before=row.before,
            part=row.part,
            cause=row.cause,
            help=f"/help/diagnosis#{row.cause.replace('_', '-')}" if row.cause else "",
            fix="" if run.source == RECIPE else row.fix,
            is_certain=row.is_certain,
            is_certain_fault=row.is_certain_fault,
            actions=list(_actions(session, run, row, fields)) if fields else [],
        )
        for row in rows
    ]


def _fields(session: Session, recipe: str) -> dict[str, config_schema.Property]:
    """Return a recipe's fields by path; empty if no worker offers the recipe."""
    try:
        schema = workers.recipe(session, recipe)["schema"]
    except NotFound:
        return {}
    return {field.path: field for field in config_schema.properties(schema)}


def _actions(
    session: Session, run: Run, finding: Finding, fields: dict[str, config_schema.Property]
) -> Iterator[Action]:
    step = None
    if finding.before is not None:
        step = checkpoints.newest_step(session, run.id, before=finding.before)
    if finding.module and "modules.fp32" in fields:
        query = f"&before={finding.before}" if finding.before else ""
        yield Action(
            label=f"{_begin(step)} with {finding.module} in fp32",
            address=f"/runs/new?from={run.id}&fp32={quote(finding.module)}{query}",
            step=step,
            settings={"modules.fp32": [finding.module]},
        )
    for remedy in finding.remedies:
        changes = _settings(session, run, remedy, fields)
        settings = {path: value for path, value in changes.items() if path in fields}
        if settings:
            # A run in another precision cannot use the scaler's state, so it starts at step 0.
            yield _action(run, settings, None if remedy in (BF16, FP32) else step)


def _settings(
    session: Session, run: Run, remedy: str, fields: dict[str, config_schema.Property]
) -> dict[str, Any]:
    """Return the changes of a remedy; empty if it is impossible or already applied."""
    now = dict(config_schema.flat(run.config))
    if remedy == "floor":
        return {"scaler.floor": 1.0} if (now.get("scaler.floor", 1) or 0) < 1 else {}
    if remedy == "restore_buffers":
        return {f"scaler.{remedy}": True} if now.get(f"scaler.{remedy}") is False else {}
    if remedy in (BF16, FP32):
        known = fields["precision"].rules.get("enum", ()) if "precision" in fields else ()
        is_able = remedy in known and remedy in workers.precisions_for(session, run.recipe)
        return {"precision": remedy} if is_able and run.precision != remedy else {}
    rates = findings.rates(run.config)
    if remedy == findings.USUAL_RATE:
        wrong = (path for path, rate in rates.items() if rate > findings.LARGEST_RATE)
        return {path: _usual_rate(fields[path]) for path in wrong if path in fields}
    lower = {path: rate / LOWER for path, rate in rates.items()}
    return {path: float(f"{rate:.6g}") for path, rate in lower.items() if rate}


def _usual_rate(field: config_schema.Property) -> float:
    """Return the recipe's default learning rate if it is a usual one, else USUAL."""
    default = field.schema.get("default")
    if isinstance(default, int | float) and 0 < default <= LARGEST_USUAL:
        return float(default)
    return USUAL


def _begin(step: int | None) -> str:
    """Return what a link does: a fork continues from a checkpoint."""
    return f"Fork from step {step:,}" if step is not None else "Start again"


def _action(run: Run, settings: JsonObject, step: int | None) -> Action:
    words = ", ".join(
        f"{path} {str(value).lower() if isinstance(value, bool) else value}"
        if isinstance(value, str | bool)
        else f"{path} {number(value)}"
        for path, value in settings.items()
    )
    changes = [("set", f"{path}={json.dumps(value)}") for path, value in settings.items()]
    checkpoint = [("step", str(step))] if step is not None else []
    query = urlencode([("from", str(run.id)), *checkpoint, *changes])
    return Action(
        label=f"{_begin(step)} with {words}",
        address=f"/runs/new?{query}",
        step=step,
        settings=settings,
    )
