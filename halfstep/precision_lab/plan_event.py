"""Precision plans as events of a run, for its page and the API."""

import msgspec

from halfstep.precision_lab.plan_result import PrecisionPlan
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import fields_of


def event_of(plan: PrecisionPlan) -> events.PrecisionPlan:
    """Return the event of a plan, which belongs to no step."""
    return msgspec.convert(plan.as_dict() | {"step": 0}, events.PrecisionPlan)


def plan_from(event: events.PrecisionPlan) -> PrecisionPlan:
    """Return the plan of an event."""
    return msgspec.convert(fields_of(event), PrecisionPlan, strict=False)  # "Infinity" is a number
