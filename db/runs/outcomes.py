"""Outcome of a run in addition to its status, for a loaded run and as a SQL condition."""

from typing import Literal, get_args

from sqlalchemy import ColumnElement, and_, exists, func, not_

from db.tables import Diagnosis, Run, Status
from halfstep.telemetry.flags import NONFINITE_LOSS

RunOutcome = Literal[
    "no_updates",  # finished, and each of its steps was skipped
    "diverged",  # finished, and the loss of its last step is known and not finite
    "stopped",  # failed by a rule of its configuration, not by code or machine
    "pruned",  # cancelled early by its sweep
]
OUTCOMES: tuple[RunOutcome, ...] = get_args(RunOutcome)
#: failure_kind of a trial that its sweep cancelled.
SWEEP = "sweep"


def run_outcome(run: Run, applied: int) -> RunOutcome | None:
    """Return how a run ended, or None. applied: own steps that changed the weights."""
    if run.status == Status.FAILED:
        return "stopped" if run.failure_kind == "rule" else None
    if run.status == Status.CANCELLED:
        return "pruned" if run.failure_kind == SWEEP else None
    if run.status != Status.FINISHED or not run.own_steps:
        return None
    if not applied:
        return "no_updates"
    return "diverged" if run.last_flags & NONFINITE_LOSS else None


def has_outcome(expected: RunOutcome) -> ColumnElement[bool]:
    """Return the SQL condition for runs with this outcome."""
    if expected == "stopped":
        return and_(Run.status == Status.FAILED, Run.failure_kind == "rule")
    if expected == "pruned":
        return and_(Run.status == Status.CANCELLED, Run.failure_kind == SWEEP)
    own_steps = Run.step - func.coalesce(Run.parent_step, 0)
    retried = exists().where(
        Diagnosis.run_id == Run.id,
        Diagnosis.kind == "retry",
        Diagnosis.content["applied"].as_boolean(),
    )
    is_finished = and_(Run.status == Status.FINISHED, own_steps > 0)
    is_no_update = and_(Run.skipped >= own_steps, not_(retried))
    if expected == "no_updates":
        return and_(is_finished, is_no_update)
    is_lost = Run.last_flags.op("&")(NONFINITE_LOSS) != 0
    return and_(is_finished, is_lost, not_(is_no_update))
