"""A run's precision diffs: one batch in two precisions, for its page and the API."""

import json
import math
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlencode

from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.http.parameters import DocumentedModel
from app.runs.summary import Number
from app.submission import config_schema
from app.telemetry.precision_plans import PlanModule
from db.tables import RECIPE, Diagnosis, Run
from db.telemetry.stored_events import StoredEvents
from halfstep.precision_lab.suggestions import (
    LOSS,
    NOISE_UNITS,
    ROUNDING_UNIT,
    Suggestions,
    suggestions_of,
)
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import fields_of
from halfstep.telemetry.events import PrecisionRow

KIND = "precision_diff"
FP32 = "modules.fp32"
MOST_STEPS = 1000
#: Bars are logarithmic: from an eighth of a rounding unit to the largest error, or this many units.
LEAST_UNITS, MOST_UNITS = 1 / 8, 64.0


class PrecisionDiffRow(BaseModel):
    """Errors of one module call or parameter against the reference."""

    name: str
    type: Annotated[str, Field(description="The module's class; empty for the loss function")]
    call: Annotated[int, Field(description="From 1; 0 for parameters")]
    direction: Annotated[str, Field(description="forward, backward or parameter")]
    dtype: Annotated[str, Field(description="Type of the first result in low precision")]
    elements: int
    error: Annotated[Number, Field(description="L2 norm of the difference over the reference's")]
    largest: Annotated[Number, Field(description="Largest difference over the reference's RMS")]
    cosine: Number
    flushed: Annotated[Number, Field(description="Share of the elements that became 0")]
    saturated: Annotated[Number, Field(description="Share at the format's largest or beyond")]
    bits: Annotated[Number, Field(description="Effective bits of the mantissa")]
    local: Annotated[Number, Field(description="Error of the module's own operations; or null")]
    inherited: Annotated[
        Number, Field(description="Remaining error, inherited from its inputs; or null")
    ]
    local_flushed: Number
    local_saturated: Number
    local_fp32: Annotated[Number, Field(description="Local error in fp32; null: not measured")]
    used_by: Annotated[list[str], Field(description="For parameters: modules that use it")]
    unknown: Annotated[str | None, Field(description="Why the local error is unknown")]


class PrecisionSuggestion(BaseModel):
    """A module that should stay in fp32."""

    name: str
    error: Annotated[
        Number, Field(description="The largest of its local errors; 0 if none is known")
    ]
    evidence: list[str]


class PrecisionDiff(DocumentedModel):
    """One batch in two precisions, compared module by module."""

    step: int
    dtype: Annotated[str, Field(description="float16 or bfloat16")]
    reference: Annotated[str, Field(description="float32 or float64")]
    scale: Number
    loss: Number
    reference_loss: Number
    error: Annotated[Number, Field(description="Of the gradient of all parameters together")]
    cosine: Number
    suggested_error: Number
    """The same with the suggested modules in fp32, if any"""
    suggestions: list[PrecisionSuggestion]
    remains: str
    """What stays wrong with the suggested modules in fp32; else empty"""
    notes: list[str]
    causes: Annotated[
        list[PlanModule],
        Field(
            description="Modules by the error of the gradient that each causes alone, with their "
            "costs; empty: not measured, as in a diff of a training"
        ),
    ]
    rows: Annotated[list[PrecisionDiffRow], Field(description="In order of the calls")]


class PrecisionDiffs(BaseModel):
    """The steps that have a diff, and one of the diffs."""

    steps: list[int]
    diff: PrecisionDiff | None


@dataclass(frozen=True)
class Bars:
    """Errors of a module's results or gradients as bars; widths are percentages."""

    row: PrecisionRow
    local: float
    inherited: float
    error: float


@dataclass
class ModuleErrors:
    """Errors of one call of a module."""

    name: str
    position: int
    is_suggested: bool
    row: PrecisionRow
    directions: dict[str, Bars] = field(default_factory=dict)


@dataclass(frozen=True)
class DiffTable:
    """A diff as the page shows it."""

    diff: events.PrecisionDiff
    suggestions: Suggestions
    calls: list[ModuleErrors]
    parameters: list[ModuleErrors]
    noise: float  # position of the noise level, as a percentage
    steps: list[int]
    fork: str  # URL of the form of a run with the suggested modules in fp32; empty: there is none


def of_run(session: Session, run: Run, step: int | None = None) -> PrecisionDiffs:
    """Return a run's diff of a step, by default the last one."""
    steps, diff = _steps(session, run.id), _diff(session, run, step)
    if diff is None:
        return PrecisionDiffs(steps=steps, diff=None)
    suggestions = suggestions_of(diff)
    fields = fields_of(diff) | {
        "suggestions": [suggestion._asdict() for suggestion in suggestions],
        "remains": suggestions.remains,
    }
    return PrecisionDiffs(steps=steps, diff=PrecisionDiff.model_validate(fields))


def table(session: Session, run: Run) -> DiffTable | None:
    """Return the last diff of a run for its page."""
    diff = _diff(session, run, None)
    if diff is None:
        return None
    rows, unit = diff.rows, ROUNDING_UNIT[diff.dtype]
    suggestions = suggestions_of(diff)
    names = {suggestion.name for suggestion in suggestions}
    finite = [float(row.error) for row in rows if math.isfinite(float(row.error))]
    most = max(MOST_UNITS, *(error / unit for error in finite), 1)

    def width(error: float | str | None) -> float:
        units = float(error or 0) / unit
        if units <= LEAST_UNITS:
            return 0.0
        if not math.isfinite(units):
            return 100.0
        share = math.log2(units / LEAST_UNITS) / math.log2(most / LEAST_UNITS)
        return round(100 * min(share, 1.0), 1)

    calls: dict[tuple[str, int], ModuleErrors] = {}
    for row in rows:
        name, key = row.name, (row.name, row.call)
        if key not in calls:
            calls[key] = ModuleErrors(name, len(calls), name in names, row)
        bars = Bars(row, width(row.local), width(row.inherited), width(row.error))
        calls[key].directions[row.direction] = bars
    return DiffTable(
        diff=diff,
        suggestions=suggestions,
        calls=[call for (_, number), call in calls.items() if number],
        parameters=[call for (_, number), call in calls.items() if not number],
        noise=width(NOISE_UNITS * unit),
        steps=_steps(session, run.id),
        fork=_fork(run, [suggestion.name for suggestion in suggestions if suggestion.name != LOSS]),
    )


def _fork(run: Run, names: list[str]) -> str:
    if run.source != RECIPE or not names:
        return ""
    now = config_schema.get(run.config, FP32, [])
    value = json.dumps(list(dict.fromkeys([*now, *names])))
    return f"/runs/new?{urlencode({'from': run.id, 'set': f'{FP32}={value}'})}"


def _steps(session: Session, run_id: int) -> list[int]:
    """Return the steps of the latest diffs, in order."""
    query = select(Diagnosis.step).where(Diagnosis.run_id == run_id, Diagnosis.kind == KIND)
    return list(session.scalars(query.order_by(Diagnosis.step.desc()).limit(MOST_STEPS)))[::-1]


def _diff(session: Session, run: Run, step: int | None) -> events.PrecisionDiff | None:
    """Return the diff of a step, by default the last one; None if there is none."""
    stored = StoredEvents(session, run)
    if step is None:
        return stored.newest(events.PrecisionDiff)
    return stored.of_step(events.PrecisionDiff, step)
