"""All damage of runs: every block is read, and compared with its checksum."""

from collections.abc import Collection, Iterator

import numpy as np
from sqlalchemy import Connection, literal, select

from db.tables import MetricBlock, MetricTail, StepBlock
from db.telemetry import block_codec, recorded_losses, step_blocks
from db.telemetry.damage import FLUSH, KINDS, LOST, METRIC, STEPS, Damage, sort
from db.telemetry.pyramid import END, SIZES, STEP_SERIES

STEP, METRICS, TAIL = (table.__table__.c for table in (StepBlock, MetricBlock, MetricTail))
#: By kind: run, first and last step (or the number of a flush), metric, bytes.
COLUMNS = {
    STEPS: (STEP.run_id, STEP.first, STEP.last, literal(""), STEP.data),
    METRIC: (METRICS.run_id, METRICS.first, METRICS.last, METRICS.name, METRICS.data),
    FLUSH: (TAIL.run_id, TAIL.revision, TAIL.revision, literal(""), TAIL.data),
}
#: Steps of the summaries that stay if a file of steps is lost.
SIZE = SIZES[1]


def find_in_run(
    connection: Connection, run_id: int, kinds: Collection[str] = KINDS
) -> list[Damage]:
    """Return the damage of a run; reads all blocks of these kinds."""
    found = list(find_in_blocks(connection, run_id, kinds))
    if LOST in kinds:
        found += _find_lost_steps(connection, run_id, found)
    recorded = [part for part in recorded_losses.read(connection, run_id) if part.kind in kinds]
    return sort({*found, *(part for part in recorded if not _is_whole(connection, part))})


def find_in_blocks(
    connection: Connection, run_id: int | None = None, kinds: Collection[str] = KINDS
) -> Iterator[Damage]:
    """Yield the damaged blocks of a run, or of all."""
    for kind, columns in COLUMNS.items():
        if kind not in kinds:
            continue
        its = [] if run_id is None else [columns[0] == run_id]
        query = select(*columns).where(*its).order_by(columns[0], columns[3], columns[1])
        rows = connection.execute(query.execution_options(yield_per=64))
        for number, first, last, name, data in rows:
            if not block_codec.is_intact(data):
                yield Damage(number, kind, first, last, name)


def _is_whole(connection: Connection, lost: Damage) -> bool:
    """Return whether steps that were lost have been recorded again."""
    if lost.kind != STEPS:
        return False
    columns = step_blocks.read_columns(connection, lost.run_id, (lost.first, lost.last))
    return len(columns["step"]) > lost.last - lost.first


def _find_lost_steps(
    connection: Connection, run_id: int, damaged: Collection[Damage]
) -> list[Damage]:
    """Return the ranges of steps of which a run has only summaries: their file was lost."""
    if step_blocks.count(connection, run_id) >= step_blocks.count_summarized_steps(
        connection, run_id
    ):
        return []
    stored = step_blocks.read_stored_buckets(connection, run_id, [(SIZE, -END, END)], STEP_SERIES)
    left = step_blocks.read_columns(connection, run_id, (-END, END))["step"] // SIZE
    ranges: list[Damage] = []
    for start, steps in zip(stored[SIZE].start.tolist(), stored[SIZE].steps.tolist(), strict=True):
        first, last = max(start, 1), start + SIZE - 1
        is_damaged = any(part.first <= last and part.last >= first for part in damaged)
        if is_damaged or np.count_nonzero(left == start // SIZE) >= steps:
            continue
        if ranges and ranges[-1].last == first - 1:
            ranges[-1] = ranges[-1]._replace(last=last)
        else:
            ranges.append(Damage(run_id, LOST, first, last))
    return ranges
