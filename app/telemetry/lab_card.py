"""The card of the precision lab on a run's page: its newest plan, and what to do next."""

from dataclasses import dataclass
from typing import Literal

from sqlalchemy.orm import Session

from app.telemetry import precision_plans
from db.tables import ENDED, PRECISION_PLAN, Run
from halfstep.number_formats import percent
from halfstep.precision_lab.plan_result import PlanModule, PrecisionPlan

#: Where the bound of the error lies on a bar.
BOUND_AT = 0.417


@dataclass(frozen=True)
class LabResult:
    """A precision plan in a sentence and a bar for each module."""

    run: Run  # that measured it
    plan: PrecisionPlan
    is_as_trained: bool = False  # whether the run that it is of trains by the plan already

    @property
    def fork(self) -> str:
        """The URL of the form of a run with the plan; empty: no form can make one."""
        best = self.plan.best
        is_usable = best.is_within and not best.is_loss_in_fp32 and not self.is_as_trained
        return precision_plans.form(self.run, best) if is_usable else ""

    @property
    def sentence(self) -> str:
        """The result in a sentence."""
        best, bound, error = (
            self.plan.best,
            *map(percent, (self.plan.max_error, self.plan.best.error)),
        )
        if not best.is_within:
            return f"No mix stays within {bound} of fp32; the least error, {error}, has {best}"
        own = ", as this run trains" if self.is_as_trained else ""
        return f"{best} stays within {bound} of fp32{own}{self._time}"

    @property
    def _time(self) -> str:
        """The time of the plan as a part of a sentence, as measured or predicted."""
        if self.plan.best.precision == "fp32":
            return ""
        time = percent(self.plan.best.time)
        if self.plan.cost == "measured":
            return f". Measured on {self.plan.device}: {time} of fp32's time"
        return f". Predicted for a GPU: {time} of fp32's time; not measured on {self.plan.device}"

    def error(self, module: PlanModule) -> float:
        """Return the gradient error that a module causes alone."""
        return module.errors.get(self.plan.best.precision, next(iter(module.errors.values()), 0.0))

    def share(self, module: PlanModule) -> float:
        """Return the part of a bar that a module's error fills, from 0 to 1."""
        return min(self.error(module) / (self.plan.max_error or 1.0) * BOUND_AT, 1.0)

    def precision(self, module: PlanModule) -> str:
        """Return the precision that the plan gives a module."""
        best = self.plan.best
        own = {module.role, *module.names}
        return "fp32" if own & {*best.fp32} else "bf16" if own & {*best.bf16} else best.precision


@dataclass(frozen=True)
class LabCard:
    """State of the precision lab's card. run: the newest that measures a plan, or has
    measured one.
    """

    run: Run | None = None
    result: LabResult | None = None

    @property
    def state(self) -> Literal["unmeasured", "running", "failed", "measured"]:
        """The state that the card's button depends on."""
        if self.run is None:
            return "unmeasured"
        if self.result:
            return "measured"
        return "failed" if self.run.status in ENDED else "running"


def lab_card(session: Session, run: Run) -> LabCard:
    """Return the card of a run, with its newest plan."""
    measured = precision_plans.list_measurements(session, run.id)
    plans = [measurement for measurement in measured if measurement.task == PRECISION_PLAN]
    for measurement in plans:
        if plan := precision_plans.of_run(session, measurement):
            return LabCard(measurement, LabResult(measurement, plan, _trains_by(run, plan)))
        if measurement.status not in ENDED:
            return LabCard(measurement)
    return LabCard(plans[0]) if plans else LabCard()


def _trains_by(run: Run, plan: PrecisionPlan) -> bool:
    """Return whether a run trains in the best mix of a plan."""
    best, modules = plan.best, run.config.get("modules", {})
    own = [run.precision, *(set(modules.get(name, [])) for name in ("fp32", "bf16"))]
    return own == [best.precision, set(best.fp32), set(best.bf16)] and not best.is_loss_in_fp32
