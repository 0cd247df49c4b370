"""Write what trainings tell: steps, scaler events, metrics, log lines, samples of the machine.

A flush is one fenced transaction and may be repeated: a row that is there already is replaced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db.queue import held
from db.tables import (
    SKIPPED,
    LogLine,
    Metric,
    Run,
    ScalerEvent,
    Step,
    SystemSample,
    Table,
)

#: Columns of a batch of steps, in the order of the spool's records.
STEP_COLUMNS = (
    "step",
    "elapsed_ms",
    "step_us",
    "loss",
    "scale",
    "grad_norm",
    "grad_norm_clipped",
    "lr",
    "flags",
)


@dataclass
class Flush:
    """What one transaction records. steps: structured arrays with the fields STEP_COLUMNS."""

    steps: list[np.ndarray[Any, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    log_lines: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps or self.events or self.log_lines or self.samples)


def record(session: Session, run_id: int, attempt: int, flush: Flush) -> None:
    """Write a flush, idempotent on (run, step). Raises Fenced if the attempt was given up."""
    run = held(session, run_id, attempt)
    connection = session.connection()
    if flush.steps:
        steps = np.concatenate(flush.steps)
        run.skipped += _skips_added(session, run_id, steps)
        _replace_steps(connection, run_id, steps)
        _summarise(run, steps)
    _record_events(connection, run, flush.events)
    _upsert(connection, LogLine, [{"run_id": run_id, **line} for line in flush.log_lines])
    _upsert(connection, SystemSample, [{"run_id": run_id, **row} for row in flush.samples])
    run.revision += 1


def _replace_steps(connection: Connection, run_id: int, steps: np.ndarray[Any, Any]) -> None:
    columns = [steps[name].tolist() for name in STEP_COLUMNS]
    # Where the clip changed nothing, its norm says nothing new.
    unclipped = (steps["grad_norm_clipped"] == steps["grad_norm"]).tolist()
    columns[6] = [None if same else v for same, v in zip(unclipped, columns[6], strict=True)]
    if connection.dialect.name == "sqlite":
        rows = zip([run_id] * len(steps), *columns, strict=True)
        connection.exec_driver_sql(_REPLACE_STEPS_SQLITE, list(rows))
    else:
        columns = [_nan_to_null(column) for column in columns]
        connection.exec_driver_sql(_REPLACE_STEPS_POSTGRESQL, (run_id, *columns))


_COLUMNS = ", ".join(("run_id", *STEP_COLUMNS))
_REPLACE_STEPS_SQLITE = (  # both statements are made of names from this file only
    f"INSERT OR REPLACE INTO steps ({_COLUMNS}) VALUES (?, {', '.join('?' * len(STEP_COLUMNS))})"  # noqa: S608
)
# One statement with an array a column: several times faster than a row at a time.
_REPLACE_STEPS_POSTGRESQL = f"""
    INSERT INTO steps ({_COLUMNS})
    SELECT %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::float8[],
                             %s::float8[], %s::float8[], %s::float8[], %s::integer[])
    ON CONFLICT (run_id, step) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in STEP_COLUMNS[1:])}
"""  # noqa: S608


def _nan_to_null(column: list[Any]) -> list[Any]:
    return [None if value != value else value for value in column]


def _skips_added(session: Session, run_id: int, steps: np.ndarray[Any, Any]) -> int:
    """Count the skips in steps beyond those of the rows that they replace."""
    replaced = session.scalar(
        select(func.count()).where(
            Step.run_id == run_id,
            Step.step.between(int(steps["step"].min()), int(steps["step"].max())),
            Step.flags.bitwise_and(SKIPPED) != 0,
        )
    )
    return int(np.count_nonzero(steps["flags"] & SKIPPED)) - (replaced or 0)


def _summarise(run: Run, steps: np.ndarray[Any, Any]) -> None:
    """Bring the figures of the run's row up to its last step."""
    last = steps[-1]
    run.step = max(run.step, int(last["step"]))
    run.loss = _number(last["loss"])
    run.scale = _number(last["scale"])
    run.steps_per_second = 1e6 / max(float(steps["step_us"][-200:].mean()), 1.0)


def _record_events(connection: Connection, run: Run, events: Iterable[dict[str, Any]]) -> None:
    scaler_events: list[dict[str, Any]] = []
    metrics: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "scaler":
            scaler_events.append(
                {
                    "run_id": run.id,
                    "step": event["step"],
                    "kind": event["kind"],
                    "optimizer": event["optimizer"] or "",
                    "scale_before": float(event["scale_before"]),
                    "scale_after": float(event["scale_after"]),
                    "loss_nonfinite": event.get("loss_nonfinite", False),
                    "culprits": event.get("culprits", []),
                }
            )
        elif event["event"] == "metric":
            metrics.append(
                {
                    "run_id": run.id,
                    "name": event["name"],
                    "step": event["step"],
                    "value": _number(float(event["value"])),
                    "elapsed_ms": event["elapsed_ms"],
                }
            )
        elif event["event"] == "resumed":
            run.resumed_step = event["step"]
    _upsert(connection, ScalerEvent, scaler_events, key=("run_id", "step", "kind", "optimizer"))
    _upsert(connection, Metric, metrics, key=("run_id", "name", "step"))


def _upsert(
    connection: Connection,
    table: type[Table],
    rows: list[dict[str, Any]],
    key: Sequence[str] = (),
) -> None:
    if not rows:
        return
    key = key or [column.name for column in table.__table__.primary_key]
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table)
    changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changed), rows)


def _number(value: Any) -> float | None:
    number = float(value)
    return None if number != number else number
