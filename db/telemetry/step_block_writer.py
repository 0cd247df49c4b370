"""The only writer of `step_blocks`, which db.telemetry.step_blocks reads.

A flush is appended to the tail of its run. Once the tail has all steps of ranges of 4,096 step
numbers, these are sealed: one block for each range, or for several where step numbers are sparse.
A sealed block has its summaries of 64 steps, and `step_buckets` has those of 512 and more steps of
sealed blocks; readers add the tail. The same steps give the same sealed blocks, however they came.

Flagged steps are rows of `steps` as well.
"""

from collections.abc import Mapping, Sequence
from itertools import dropwhile, pairwise
from typing import Any

import numpy as np
from sqlalchemy import Connection, delete, func, select, update

from db.errors import StepsMissing
from db.tables import IN_TAIL, Step, StepBucket
from db.telemetry import block_codec, bulk_writes
from db.telemetry.block_codec import NAMES, Columns, Records
from db.telemetry.pyramid import END, SIZES, STEP_SERIES, siblings, sum_up
from db.telemetry.recorded_losses import record_losses
from db.telemetry.step_blocks import (
    BLOCKS,
    FLAGS,
    RANGE,
    Newest,
    blocks,
    check_converted,
    count_summarized_steps,
    join_steps,
    last_step,
    newest_block,
    overlapping,
    points_of,
    read_stored_buckets,
    tail_blocks,
    within,
)
from db.telemetry.summaries import Ints, merge, pack

#: Steps of a sealed block, at least, except those that are sealed again.
LEAST_STEPS = RANGE // 2
#: From so many steps on a part of the tail is compressed.
COMPRESSED_STEPS = 256
#: Parts of the tail are joined when it passes a multiple of so many steps and has so many of them.
JOINED_STEPS, JOINED_PARTS = 512, 32

_STEPS: Any = Step.__table__


@record_losses
def write(connection: Connection, run_id: int, records: Records) -> bool:
    """Write steps, given in order; return whether all of them are later than the recorded ones.

    Steps that are recorded already are replaced. The caller holds the lock of the run. Raises
    StepsNotConverted.
    """
    check_converted(connection, run_id)
    newest = newest_block(connection, run_id)
    first = int(records["step"][0])
    if newest is not None and first <= newest.end:
        _replace(connection, run_id, block_codec.of_records(records))
        return False
    _append(connection, run_id, block_codec.of_records(records), records, newest)
    return True


@record_losses
def append_converted(connection: Connection, run_id: int, columns: Columns) -> None:
    """Write steps that are later than all in blocks, and whose flagged ones are rows already."""
    _append(connection, run_id, columns, None, newest_block(connection, run_id), has_rows=True)


@record_losses
def truncate(connection: Connection, run_id: int, *, after: int) -> None:
    """Delete the steps after a step; the block that contains it becomes the tail.

    Raises StepsNotConverted.
    """
    check_converted(connection, run_id)
    connection.execute(delete(BLOCKS).where(BLOCKS.c.run_id == run_id, BLOCKS.c.first > after))
    connection.execute(delete(_STEPS).where(_STEPS.c.run_id == run_id, _STEPS.c.step > after))
    newest, cut = newest_block(connection, run_id), after + 1
    if newest is not None and after < newest.end:
        cut = min(cut, newest.first)
        block = overlapping(connection, run_id, (newest.first, newest.last))
        its = (BLOCKS.c.run_id == run_id, BLOCKS.c.first == newest.first)
        connection.execute(delete(BLOCKS).where(*its))
        columns = within(join_steps(block, NAMES), (-END, after))
        if len(columns["step"]):
            _insert(connection, run_id, [_part(columns)])
    _truncate_buckets(connection, run_id, cut // RANGE * RANGE)


def take_over_buckets(connection: Connection, run_id: int, *, lost: bool) -> None:
    """Delete the summaries of an earlier version that blocks have, or that readers compute.

    lost: steps are missing, of which the larger summaries stay.
    """
    of_run = StepBucket.run_id == run_id
    connection.execute(delete(StepBucket).where(of_run, StepBucket.size == SIZES[0]))
    if not lost:
        _truncate_buckets(connection, run_id, _find_sealed_end(connection, run_id))


@record_losses
def join_tail(connection: Connection, run_id: int) -> None:
    """Join the parts of a run's tail, as at the end of an attempt."""
    tail = tail_blocks(connection, run_id)
    if len(tail) > 1:
        _delete_tail(connection, run_id)
        _insert(connection, run_id, [_part(join_steps(tail, NAMES))])


def rebuild(connection: Connection, run_id: int, *, lost: bool = False) -> None:
    """Compute all summaries of a run's steps again.

    Raises StepsMissing if they count steps that cannot be read, unless `lost`.
    """
    check_converted(connection, run_id)
    expected = count_summarized_steps(connection, run_id)
    connection.execute(delete(StepBucket).where(StepBucket.run_id == run_id))
    readable = 0
    for block in blocks(connection, run_id):
        columns = join_steps([block], NAMES)
        readable += len(columns["step"])
        if block.is_sealed and len(columns["step"]):
            [sealed] = _seal_groups(connection, run_id, [columns])
            its = (BLOCKS.c.run_id == run_id, BLOCKS.c.first == block.first)
            connection.execute(update(BLOCKS).where(*its).values(lows=sealed["lows"]))
    if readable < expected and not lost:
        raise StepsMissing.of(readable, expected)


def _append(
    connection: Connection,
    run_id: int,
    columns: Columns,
    records: Records | None,
    newest: Newest | None,
    *,
    has_rows: bool = False,
) -> None:
    first, last = int(columns["step"][0]), int(columns["step"][-1])
    if not has_rows:
        _write_flagged(connection, run_id, columns)
    has_tail = newest is not None and not newest.is_sealed
    begun = newest.last if newest is not None and has_tail else first
    if begun // RANGE < last // RANGE and _is_long(connection, run_id, columns, has_tail=has_tail):
        _seal(connection, run_id, columns, has_tail=has_tail)
        return
    if has_tail and begun // JOINED_STEPS < last // JOINED_STEPS:
        tail = tail_blocks(connection, run_id)
        parts = list(dropwhile(lambda block: not block.is_small, tail))
        if len(parts) >= JOINED_PARTS:
            its = (BLOCKS.c.run_id == run_id, BLOCKS.c.first >= parts[0].first)
            connection.execute(delete(BLOCKS).where(*its))
            columns, records = block_codec.join([join_steps(parts, NAMES), columns]), None
    _insert(connection, run_id, [_part(columns, records)])


def _is_long(connection: Connection, run_id: int, columns: Columns, *, has_tail: bool) -> bool:
    """Return whether a tail has enough steps to be sealed, with those that are added."""
    number = func.coalesce(func.sum(BLOCKS.c.steps), 0)
    query = select(number).where(BLOCKS.c.run_id == run_id, IN_TAIL)
    before = int(connection.scalar(query) or 0) if has_tail else 0
    return before + len(columns["step"]) >= LEAST_STEPS


def _seal(connection: Connection, run_id: int, columns: Columns, *, has_tail: bool) -> None:
    """Seal all complete ranges of the tail and of the steps after it."""
    if has_tail:
        tail = tail_blocks(connection, run_id)
        _delete_tail(connection, run_id)
        columns = block_codec.join([join_steps(tail, NAMES), columns])
    groups = _groups(columns)
    rest = groups.pop()
    if groups and len(groups[-1]["step"]) < LEAST_STEPS:
        rest = block_codec.join([groups.pop(), rest])
    _insert(connection, run_id, [*_seal_groups(connection, run_id, groups), _part(rest)])


def _groups(columns: Columns) -> list[Columns]:
    """Split steps at the edges of ranges into blocks of at least LEAST_STEPS; the last is open.

    The one before it may be smaller.
    """
    at = columns["step"] // RANGE
    edges = [0, *(np.flatnonzero(np.diff(at)) + 1).tolist()]
    starts = [0]
    for edge in edges[1:-1]:
        if edge - starts[-1] >= LEAST_STEPS:
            starts.append(edge)
    if edges[-1] > starts[-1]:
        starts.append(edges[-1])
    ends = [*starts[1:], len(at)]
    return [
        block_codec.chosen(columns, slice(start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def _replace(connection: Connection, run_id: int, columns: Columns) -> None:
    """Write steps among recorded ones; the blocks that they touch are written again."""
    steps = columns["step"]
    span = (int(steps[0]) // RANGE * RANGE, (int(steps[-1]) // RANGE + 1) * RANGE - 1)
    touched = overlapping(connection, run_id, span)
    recorded = join_steps(touched, NAMES)
    is_other = ~np.isin(recorded["step"], steps)
    merged = block_codec.join([block_codec.chosen(recorded, is_other), columns])
    merged = block_codec.chosen(merged, np.argsort(merged["step"], kind="stable"))
    if block_codec.are_equal(merged, recorded):
        return
    _delete_flagged(connection, run_id, steps)
    _write_flagged(connection, run_id, columns)
    end = _find_sealed_end(connection, run_id)
    if touched:
        between = BLOCKS.c.first.between(touched[0].first, touched[-1].first)
        connection.execute(delete(BLOCKS).where(BLOCKS.c.run_id == run_id, between))
    is_sealed = merged["step"] < end
    rows = []
    if is_sealed.any():
        groups = _groups(block_codec.chosen(merged, is_sealed))
        if len(groups) > 1 and len(groups[-1]["step"]) < LEAST_STEPS:
            groups[-2:] = [block_codec.join(groups[-2:])]
        rows += _seal_groups(connection, run_id, groups)
    tail = block_codec.chosen(merged, ~is_sealed)
    if not len(tail["step"]):
        _insert(connection, run_id, rows)
        return
    _insert(connection, run_id, [*rows, _part(tail)])
    begun = connection.scalar(select(func.min(BLOCKS.c.first)).where(*_in_tail(run_id)))
    last, none = last_step(connection, run_id), block_codec.empty()
    is_complete = begun is not None and last is not None and begun // RANGE < last // RANGE
    if is_complete and _is_long(connection, run_id, none, has_tail=True):
        _seal(connection, run_id, none, has_tail=True)


def _part(columns: Columns, records: Records | None = None) -> dict[str, object]:
    """Return a row of the tail. records: the same steps as the spool has them."""
    if records is not None and len(records) < COMPRESSED_STEPS:
        data = block_codec.encode_records(records)
    else:
        data = block_codec.encode(columns)
    return _row(columns) | {"is_sealed": False, "lows": None, "data": data}


def _row(columns: Columns) -> dict[str, Any]:
    steps = columns["step"]
    return {"first": int(steps[0]), "last": int(steps[-1]), "steps": len(steps)}


def _insert(connection: Connection, run_id: int, rows: Sequence[Mapping[str, object]]) -> None:
    if rows:
        connection.execute(BLOCKS.insert(), [{"run_id": run_id, **row} for row in rows])


def _delete_tail(connection: Connection, run_id: int) -> None:
    connection.execute(delete(BLOCKS).where(*_in_tail(run_id)))


def _in_tail(run_id: int) -> tuple[Any, Any]:
    return BLOCKS.c.run_id == run_id, IN_TAIL


def _write_flagged(connection: Connection, run_id: int, columns: Columns) -> None:
    is_flagged = (columns["flags"] & FLAGS) != 0
    if is_flagged.any():
        flagged: dict[str, bulk_writes.Column] = {**block_codec.chosen(columns, is_flagged)}
        bulk_writes.replace(connection, _STEPS, {"run_id": run_id}, flagged)


def _delete_flagged(connection: Connection, run_id: int, steps: Ints) -> None:
    span = _STEPS.c.step.between(int(steps[0]), int(steps[-1]))
    recorded = connection.scalars(select(_STEPS.c.step).where(_STEPS.c.run_id == run_id, span))
    replaced = np.intersect1d(np.array(recorded.all(), np.int64), steps).tolist()
    for at in range(0, len(replaced), RANGE):
        its = (_STEPS.c.run_id == run_id, _STEPS.c.step.in_(replaced[at : at + RANGE]))
        connection.execute(delete(_STEPS).where(*its))


def _seal_groups(
    connection: Connection, run_id: int, groups: Sequence[Columns]
) -> list[dict[str, Any]]:
    """Return the rows of sealed blocks, and write their summaries of 512 and more steps."""
    if not groups:
        return []
    points = points_of(block_codec.join(groups), STEP_SERIES)
    first, last = int(points.step[0]), int(points.step[-1])
    there = read_stored_buckets(
        connection, run_id, [siblings(first, last, size) for size in SIZES[2:]], STEP_SERIES
    )
    there |= dict.fromkeys(SIZES[:2], there[SIZES[-1]][:0])  # a block has all steps of these
    start, size, packed = sum_up(points, there, STEP_SERIES)
    is_low = size == SIZES[0]
    number = int(is_low.sum())  # they come first
    columns: dict[str, bulk_writes.Column] = {
        "size": size[number:],
        "bucket": (start // size)[number:],
        "summary": packed[number:],
    }
    bulk_writes.replace(connection, StepBucket.__table__, {"run_id": run_id}, columns)
    buckets, rows = start[:number] // SIZES[0], []
    for group in groups:
        its = _row(group)
        low, high = np.searchsorted(
            buckets, [its["first"] // SIZES[0], its["last"] // SIZES[0] + 1]
        ).tolist()
        lows = block_codec.encode_lows(buckets[low:high], packed[low:high])
        rows.append(its | {"is_sealed": True, "lows": lows, "data": block_codec.encode(group)})
    return rows


def _truncate_buckets(connection: Connection, run_id: int, end: int) -> None:
    """Delete the summaries of steps from the end of the sealed blocks on."""
    for size in SIZES[1:]:
        # A larger summary than a range is computed below if it has steps before the end.
        beyond = (StepBucket.size == size, StepBucket.bucket >= end // size)
        connection.execute(delete(StepBucket).where(StepBucket.run_id == run_id, *beyond))
    for below, size in pairwise(SIZES[2:]):
        if not end % size:
            continue
        lower = (below, end // size * size // below, end // below)
        parts = read_stored_buckets(connection, run_id, [lower], STEP_SERIES)[below]
        if not len(parts):
            continue
        whole = merge(parts, size)
        columns: dict[str, bulk_writes.Column] = {
            "size": np.full(len(whole), size),
            "bucket": whole.start // size,
            "summary": pack(whole, STEP_SERIES, size),
        }
        bulk_writes.replace(connection, StepBucket.__table__, {"run_id": run_id}, columns)


def _find_sealed_end(connection: Connection, run_id: int) -> int:
    """Return the first step that no sealed block can have."""
    query = select(BLOCKS.c.last).where(BLOCKS.c.run_id == run_id, BLOCKS.c.is_sealed)
    last = connection.scalar(query.order_by(BLOCKS.c.first.desc()).limit(1))
    return -END if last is None else (last // RANGE + 1) * RANGE
