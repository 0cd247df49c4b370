"""Steps of runs as rows."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy.orm import Session

from db.telemetry import block_codec, step_blocks
from db.telemetry.block_codec import Columns
from db.telemetry.pyramid import END
from halfstep.telemetry.flags import UNKNOWN_LOSS, UNKNOWN_NORM

#: Steps between two of `rows_at` up to which one query reads both.
GAP_STEPS = 1_000


class StepRow(NamedTuple):
    """A step. NaN is None."""

    step: int
    elapsed_ms: int
    step_us: int
    loss: float | None
    scale: float | None
    grad_norm: float | None
    grad_norm_clipped: float | None  # that of grad_norm where the clip changed nothing
    lr: float | None
    flags: int
    data_us: int | None

    def with_nan(self) -> "StepRow":
        """Return the step with NaN as NaN; None is then unknown.

        Rows of logged numbers by earlier versions have neither a flag nor a learning rate.
        """
        row = self
        if row.loss is None and not row.flags & UNKNOWN_LOSS:
            row = row._replace(loss=math.nan)
        is_known = not row.flags & UNKNOWN_NORM and row.lr is not None
        if row.grad_norm is None and is_known:
            row = row._replace(grad_norm=math.nan)
        if row.grad_norm_clipped is None and is_known:
            row = row._replace(grad_norm_clipped=math.nan)
        return row


def read_rows(
    session: Session, run_id: int, *, first: int = -END, last: int | None = None, most: int
) -> list[StepRow]:
    """Return the first `most` steps from first to last, in order. Raises StepsNotConverted."""
    span = (first, END if last is None else last)
    return _rows(step_blocks.read_columns(session.connection(), run_id, span, most=most))


def rows_at(session: Session, run_id: int, steps: Collection[int]) -> list[StepRow]:
    """Return those of some steps that exist, in order. Raises StepsNotConverted."""
    if not steps:
        return []
    numbers = np.unique(np.array(list(steps), np.int64))
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > GAP_STEPS) + 1)
    read = [
        step_blocks.read_columns(session.connection(), run_id, (int(part[0]), int(part[-1])))
        for part in parts
    ]
    columns = block_codec.join(read)
    return _rows(block_codec.chosen(columns, np.isin(columns["step"], numbers)))


def first_loss(session: Session, run_id: int, step: int) -> float | None:
    """Return the first finite loss from a step on. Raises StepsNotConverted."""
    for block in step_blocks.blocks(session.connection(), run_id, (step, END)):
        columns = step_blocks.join_steps([block], block_codec.NAMES)
        finite = np.isfinite(columns["loss"]) & (columns["step"] >= step)
        if finite.any():
            return float(columns["loss"][finite][0])
    return None


def last_row(session: Session, run_id: int) -> StepRow | None:
    """Return the last step of a run. Raises StepsNotConverted."""
    last = step_blocks.last_step(session.connection(), run_id)
    rows: Sequence[StepRow] = [] if last is None else rows_at(session, run_id, [last])
    return rows[0] if rows else None


def _rows(columns: Columns) -> list[StepRow]:
    columns = columns | {"grad_norm_clipped": step_blocks.get_applied_norm(columns)}
    lists = (block_codec.to_list(name, columns[name]) for name in StepRow._fields)
    return list(map(StepRow._make, zip(*lists, strict=True)))
