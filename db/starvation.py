"""Whether a run waits for its data: of its latest steps, how many did, and for how long."""

from dataclasses import dataclass

from sqlalchemy import case, func, select
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
    waited = case((Step.data_us >= REAL_SHARE * Step.step_us, 1), else_=0)
    sums = (func.count(), func.sum(waited), func.sum(Step.data_us), func.sum(Step.step_us))
    latest = (Step.run_id == run.id, Step.step > run.step - WINDOW, Step.data_us.is_not(None))
    steps, count, data_us, step_us = session.execute(select(*sums).where(*latest)).one()
    return Starvation(steps, count, float(data_us) / max(float(step_us), 1.0)) if steps else None
