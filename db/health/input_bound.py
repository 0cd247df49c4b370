"""Whether a run waits for its data: of its latest steps, how many did, and for how long."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import bindparam, case, func, select
from sqlalchemy.orm import Session

from db.tables import Run, Step

WINDOW = 100
#: Of a step, or of all of them: less is what handing over a batch costs.
REAL_SHARE = 0.2


@dataclass(frozen=True)
class Starvation:
    """steps: the latest of which it is known; waited: those that did for a fifth of their time or
    more; share: of the time of all of them.
    """

    steps: int
    waited: int
    share: float

    @property
    def is_real(self) -> bool:
        """Whether the run would be faster with data at hand."""
        return self.share >= REAL_SHARE

    @property
    def per_cent(self) -> int:
        """Of the steps, those that waited."""
        return round(100 * self.waited / self.steps)


def starvation(session: Session, run: Run) -> Starvation | None:
    """Look at a run's last 100 steps; None where nobody knows what they waited for."""
    return starvations(session, [run.id]).get(run.id)


def starvations(session: Session, run_ids: Collection[int]) -> dict[int, Starvation]:
    """Look at runs, in one query; those are left out of which nobody knows."""
    return {
        run_id: Starvation(steps, count, float(data_us) / max(float(step_us), 1.0))
        for run_id, steps, count, data_us, step_us in session.execute(
            _sums_query(), {"run_ids": list(run_ids)}
        )
    }


@cache
def _sums_query() -> Any:
    waited = case((Step.data_us >= REAL_SHARE * Step.step_us, 1), else_=0)
    sums = (func.count(), func.sum(waited), func.sum(Step.data_us), func.sum(Step.step_us))
    latest = (Step.run_id == Run.id) & (Step.step > Run.step - WINDOW)
    query = select(Run.id, *sums).join(Step, latest & Step.data_us.is_not(None))
    return query.where(Run.id.in_(bindparam("run_ids", expanding=True))).group_by(Run.id)
