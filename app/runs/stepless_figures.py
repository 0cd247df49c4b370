"""Figures of a run without steps: a command, or a script that only logs numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from app.runs.key_figures import MetricFigure
from db.runs import runs
from db.tables import COMMAND, ENDED, WATCH, LatestMetric, Run, Status
from db.telemetry.latest_metrics import COUNTERS, is_evaluation

#: Tiles of each kind.
MOST_METRICS, MOST_PARAMETERS = 4, 3
#: How the reason of a failed command begins; the second form is that of earlier versions.
EXIT_CODE = re.compile(r"(?:the command exited with|exit) code (\d{1,3})\b")


@dataclass(frozen=True)
class SteplessFigures:
    """Tiles of a run without steps."""

    exit_code: int | None = None  # of a command that ended by itself
    metrics: Sequence[MetricFigure] = ()
    parameters: dict[str, Any] = field(default_factory=dict)  # of a command


def stepless_figures(session: Session, run: Run) -> SteplessFigures | None:
    """Return the tiles of a run without steps; None if it has some, or its first is expected."""
    is_command = run.source == COMMAND
    if run.step or not (is_command or run.source == WATCH):
        return None
    metrics = _metrics(session, run)
    if not (is_command or metrics or run.status in ENDED):
        return None
    parameters = dict(list(run.config.items())[:MOST_PARAMETERS]) if is_command else {}
    return SteplessFigures(_exit_code(session, run) if is_command else None, metrics, parameters)


def _metrics(session: Session, run: Run) -> list[MetricFigure]:
    name = LatestMetric.name
    query = select(name, LatestMetric.step, LatestMetric.value).where(
        LatestMetric.run_id == run.id,
        func.lower(name).not_in(COUNTERS),
        ~name.startswith("run/"),
    )
    order = case((is_evaluation(), 0), else_=1)
    rows = session.execute(query.order_by(order, name).limit(MOST_METRICS))
    return [MetricFigure.of(row.name, row.step, row.value) for row in rows]


def _exit_code(session: Session, run: Run) -> int | None:
    if run.status == Status.FINISHED:
        return 0
    last = runs.last_change(session, run.id)
    found = EXIT_CODE.match(last.reason or "") if last and run.status == Status.FAILED else None
    return int(found[1]) if found else None
