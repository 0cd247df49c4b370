"""Data waits: the share of a run's latest steps that waited for data, and of their time."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import bindparam, case, func, select
from sqlalchemy.orm import Session

from db.tables import Run, Step

WINDOW = 100
#: Share of the time of a step, or of all steps: less than that is the cost of handing over a batch.
REAL_SHARE = 0.2


@dataclass(frozen=True)
class DataWait:
    """Data waits of a run's latest steps."""

    steps: int  # latest steps with a known wait
    waited: int  # those that waited for REAL_SHARE of their time or longer
    share: float  # of the time of all of them

    @property
    def is_real(self) -> bool:
        """Whether the run is input-bound."""
        return self.share >= REAL_SHARE

    @property
    def per_cent(self) -> int:
        """Share of the steps that waited, in percent."""
        return round(100 * self.waited / self.steps)


def data_wait(session: Session, run: Run) -> DataWait | None:
    """Return the data wait of a run's last 100 steps; None if it is unknown."""
    return data_waits(session, [run.id]).get(run.id)


def data_waits(session: Session, run_ids: Collection[int]) -> dict[int, DataWait]:
    """Return the data waits of runs, in one query, without those that are unknown."""
    return {
        run_id: DataWait(steps, count, float(data_us) / max(float(step_us), 1.0))
        for run_id, steps, count, data_us, step_us in session.connection().execute(
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
