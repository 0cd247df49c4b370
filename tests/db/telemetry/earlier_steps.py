"""Steps of a run in the forms of earlier versions: rows, or rows and a Parquet file."""

import io
from hashlib import sha256
from typing import Any

import numpy as np
import obstore
from obstore.store import ObjectStore
from sqlalchemy import Connection, delete, select

from db.database import Database
from db.files.step_files import LR_BITS, NAMES, WHOLE
from db.tables import (
    FrozenSteps,
    LossCurve,
    Run,
    Step,
    StepBlock,
    StepBucket,
    StepConversion,
)
from db.telemetry import bulk_writes, step_blocks
from db.telemetry.block_codec import Columns
from db.telemetry.pyramid import SIZES, STEP_SERIES, sum_up
from db.telemetry.summaries import unpack

GROUP_STEPS = 500
LATEST_ROWS = 100


def as_rows(database: Database, run: Run) -> Columns:
    """Store all steps of a run as rows with summaries of all sizes; return them."""
    with database.writing() as session:
        connection = session.connection()
        columns = step_blocks.read_columns(connection, run.id, (-step_blocks.END, step_blocks.END))
        for table in (Step, StepBlock, StepBucket, LossCurve):
            session.execute(delete(table).where(table.run_id == run.id))
        store_rows(connection, run.id, columns)
        session.merge(StepConversion(run_id=run.id))
        stored = session.get_one(Run, run.id)
        stored.last_elapsed_ms = stored.lost_since = None
    return columns


def store_rows(connection: Connection, run_id: int, columns: Columns) -> None:
    """Store steps as rows with their summaries, where no other steps share them."""
    key = {"run_id": run_id}
    rows: dict[str, bulk_writes.Column] = {**columns}
    bulk_writes.replace(connection, Step.__table__, key, rows)
    none = unpack(np.empty(0, np.int64), [], STEP_SERIES, SIZES[0])
    points = step_blocks.points_of(columns, STEP_SERIES)
    start, size, packed = sum_up(points, dict.fromkeys(SIZES, none), STEP_SERIES)
    buckets: dict[str, bulk_writes.Column] = {
        "size": size,
        "bucket": start // size,
        "summary": packed,
    }
    bulk_writes.replace(connection, StepBucket.__table__, key, buckets)


def as_file(database: Database, store: ObjectStore, run: Run) -> str:
    """Store the steps of a run in a file, except the latest, which are rows; return its key."""
    columns = as_rows(database, run)
    content, key = parquet_of(columns), f"steps/{run.id}/made.parquet"
    obstore.put(store, key, content)
    last = int(columns["step"][-1])
    with database.writing() as session:
        is_plain = Step.flags.op("&")(step_blocks.FLAGS) == 0
        its = (Step.run_id == run.id, Step.step <= last - LATEST_ROWS, is_plain)
        session.execute(delete(Step).where(*its, Step.step != int(columns["step"][0])))
        lowest = (StepBucket.run_id == run.id, StepBucket.size == SIZES[0])
        session.execute(delete(StepBucket).where(*lowest))
        digest = sha256(content).hexdigest()
        file = {"key": key, "size_bytes": len(content), "sha256": digest, "path": None}
        further = {"footer_sha256": "", "attempt": run.attempt, "is_settled": True}
        session.add(FrozenSteps(run_id=run.id, step=last, **file, **further))
    return key


def parquet_of(columns: Columns) -> bytes:
    """Return the Parquet file of steps."""
    import pyarrow as pa
    from pyarrow import parquet

    table: dict[str, Any] = {}
    for name in NAMES:
        values = columns[name]
        missing = np.isnan(values)
        if name in WHOLE:
            table[name] = pa.array(values, pa.int64())
        elif name == "lr":
            table[LR_BITS] = pa.array(values.view(np.int64), pa.int64(), mask=missing)
        elif name == "data_us":
            whole = np.where(missing, 0, values).astype(np.int64)
            table[name] = pa.array(whole, pa.int64(), mask=missing)
        else:
            table[name] = pa.array(values.astype(np.float32), pa.float32(), mask=missing)
    sink = io.BytesIO()
    made = pa.table(table)
    parquet.write_table(made, sink, row_group_size=GROUP_STEPS, write_page_checksum=True)
    return sink.getvalue()


def rows_left(database: Database, run: Run) -> list[int]:
    """Return the run's steps that are still rows."""
    with database.reading() as session:
        query = select(Step.step).where(Step.run_id == run.id).order_by(Step.step)
        return list(session.scalars(query))
