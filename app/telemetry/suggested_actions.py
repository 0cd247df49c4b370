"""What may be done about a finding, and is possible now: a new run's form, filled in."""

import json
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.submission import config_schema
from db.errors import NotFound
from db.files import checkpoints
from db.health import findings
from db.health.finding import Finding
from db.queue import workers
from db.tables import RECIPE, Run

BF16, FP32 = "bf16", "fp32"
#: By how much a learning rate is lowered.
LOWER = 10
#: Learning rates that most trainings begin with.
USUAL, LARGEST_USUAL = 0.001, 0.1


class Action(BaseModel):
    """A run that may mend what is wrong."""

    label: str
    address: Annotated[str, Field(description="Of the form of a new run, filled in")]
    step: Annotated[int | None, Field(description="Of the checkpoint that it starts from, if any")]
    settings: Annotated[dict[str, Any], Field(description="What is changed, by path")]


class AdvisedFinding(BaseModel):
    """What is wrong, in words, and what to do about it."""

    title: str
    text: str
    module: Annotated[str | None, Field(description="That a fork may run in fp32, to mend it")]
    before: Annotated[int | None, Field(description="The step from which on it is so")]
    part: Annotated[str, Field(description="Of the run's page, with the figures; or empty")]
    cause: Annotated[
        str, Field(description="One of docs/reference/diagnosis.md; empty for mere advice")
    ]
    help: Annotated[str, Field(description="Address of the cause's section; or empty")]
    fix: Annotated[str, Field(description="The change to a script, as code; or empty")]
    is_certain: Annotated[bool, Field(description="False: other causes are not excluded")]
    actions: Annotated[list[Action], Field(description="Those that are possible now")]


def advised(session: Session, run: Run) -> list[AdvisedFinding]:
    """Return what is wrong with a run, each with what can be done. Only forms are opened by it."""
    found = findings.of_run(session, run)
    fields: dict[str, config_schema.Property] = {}
    if run.source == RECIPE and any(each.remedies or each.module for each in found):
        fields = _fields(session, run.recipe)
    return [
        AdvisedFinding(
            title=each.title,
            text=each.text,
            module=each.module,
            before=each.before,
            part=each.part,
            cause=each.cause,
            help=f"/help/diagnosis#{each.cause.replace('_', '-')}" if each.cause else "",
            fix="" if run.source == RECIPE else each.fix,
            is_certain=each.is_certain,
            actions=list(_actions(session, run, each, fields)) if fields else [],
        )
        for each in found
    ]


def _fields(session: Session, recipe: str) -> dict[str, config_schema.Property]:
    """Return a recipe's fields by path: none where nobody offers it."""
    try:
        schema = workers.recipe(session, recipe)["schema"]
    except NotFound:
        return {}
    return {each.path: each for each in config_schema.properties(schema)}


def _actions(
    session: Session, run: Run, finding: Finding, fields: dict[str, config_schema.Property]
) -> Iterator[Action]:
    step = None
    if finding.before is not None:
        step = checkpoints.newest_step(session, run.id, before=finding.before)
    if finding.module and "modules.fp32" in fields:
        query = f"&before={finding.before}" if finding.before else ""
        yield Action(
            label=f"Fork with {finding.module} in fp32",
            address=f"/runs/new?from={run.id}&fp32={quote(finding.module)}{query}",
            step=step,
            settings={"modules.fp32": [finding.module]},
        )
    for remedy in finding.remedies:
        wanted = _settings(session, run, remedy, fields)
        settings = {path: value for path, value in wanted.items() if path in fields}
        if settings:
            # The scaler's state is of no use in another precision: that one begins anew.
            yield _action(run, settings, None if remedy in (BF16, FP32) else step)


def _settings(
    session: Session, run: Run, remedy: str, fields: dict[str, config_schema.Property]
) -> dict[str, Any]:
    """Return what a remedy changes: nothing where it cannot, or has done so already."""
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
    """Return the recipe's own, where that is one."""
    default = field.schema.get("default")
    if isinstance(default, int | float) and 0 < default <= LARGEST_USUAL:
        return float(default)
    return USUAL


def _action(run: Run, settings: dict[str, Any], step: int | None) -> Action:
    words = ", ".join(
        f"{path} {str(value).lower() if isinstance(value, bool) else value}"
        if isinstance(value, str | bool)
        else f"{path} {value:g}"
        for path, value in settings.items()
    )
    begin = f"Fork from step {step:,}" if step is not None else "Start again"
    changes = [("set", f"{path}={json.dumps(value)}") for path, value in settings.items()]
    place = [("step", str(step))] if step is not None else []
    query = urlencode([("from", str(run.id)), *place, *changes])
    return Action(
        label=f"{begin} with {words}",
        address=f"/runs/new?{query}",
        step=step,
        settings=settings,
    )
