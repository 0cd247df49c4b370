"""Data waits: the share of a run's latest steps that waited for data, and of their time."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from sqlalchemy.orm import Session

from db.tables import Run
from db.telemetry import step_blocks
from db.telemetry.block_codec import Columns

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
    latest = step_blocks.latest(session.connection(), run_ids, ("data_us", "step_us"), steps=WINDOW)
    waits = {run_id: _data_wait(columns) for run_id, columns in latest.items()}
    return {run_id: wait for run_id, wait in waits.items() if wait is not None}


def _data_wait(columns: Columns) -> DataWait | None:
    is_known = ~np.isnan(columns["data_us"])
    data_us, step_us = columns["data_us"][is_known], columns["step_us"][is_known]
    if not len(data_us):
        return None
    waited = int(np.count_nonzero(data_us >= REAL_SHARE * step_us))
    return DataWait(len(data_us), waited, float(data_us.sum()) / max(float(step_us.sum()), 1.0))
