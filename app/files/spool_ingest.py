"""Ingest of a watched run's spool, piece by piece."""

import math
import time
import traceback
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException

from app.http.security_headers import PIECE_BYTES
from db.database import Database, is_outage
from db.errors import HalfstepError, Invalid
from db.tables import User
from db.telemetry import ingest, step_conversion
from halfstep.telemetry.plain_json import safe_repr
from halfstep.telemetry.spool import SpoolPart, Unrecordable

#: Bytes of the spool per transaction: about 20,000 steps.
TRANSACTION_BYTES = 1 << 20
#: Metric points cost more than steps: about 50 ms of SQLite's write lock.
TRANSACTION_ITEMS = 1000
#: A piece that takes longer lets other processes write, which poll SQLite's lock every 0.1 s.
WORK_SECONDS, PAUSE_SECONDS = 0.2, 0.1


class SpoolPosition(NamedTuple):
    """The position in a run's spool at which a piece claims to start, with its sender."""

    user: User
    run_id: int
    attempt: int
    sequence: int
    offset: int
    writer: ingest.Writer = "training"


def unpack(body: bytes, encoding: str) -> bytes:
    """Return a piece decompressed. Raises Invalid, HTTPException 413, 415."""
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise HTTPException(415, f"Content-Encoding is {encoding[:100]!r}; allowed: gzip")
    gunzip = zlib.decompressobj(wbits=31)
    try:
        piece = gunzip.decompress(body, PIECE_BYTES + 1)
    except zlib.error as error:
        raise Invalid({"body": f"not gzip: {error}"}) from error
    if len(piece) > PIECE_BYTES:
        text = f"The piece is too large; allowed: at most {PIECE_BYTES:,} bytes unpacked."
        raise HTTPException(413, text)
    if not gunzip.eof or gunzip.unused_data:
        raise Invalid({"body": "not exactly one complete gzip member"})
    return piece


def take_spool(
    database: Database, position: SpoolPosition, piece: bytes, *, at_once: bool = False
) -> int:
    """Record the complete frames of a piece; return the offset at which they end.

    Rows and offset are written in one transaction, bounded in bytes and items.
    at_once: without bounds, if no other process writes; three times as fast for many metrics.
    """
    limits = (PIECE_BYTES, math.inf) if at_once else (TRANSACTION_BYTES, TRANSACTION_ITEMS)
    try:
        part = SpoolPart(piece, position.offset)
    except ValueError as error:
        raise Invalid({"body": str(error)}) from error
    # The first time also without a frame, so that the position is checked.
    items = part.poll(limits[0], limit_items=limits[1])
    _record_individually(database, position, items, part.offset)
    is_polled = database.engine.dialect.name == "sqlite"
    paused_at = time.monotonic()
    while items:
        position = position._replace(offset=part.offset)
        if items := part.poll(limits[0], limit_items=limits[1]):
            if is_polled and time.monotonic() - paused_at > WORK_SECONDS:
                time.sleep(PAUSE_SECONDS)
                paused_at = time.monotonic()
            _record_individually(database, position, items, part.offset)
    return part.offset


def _record_individually(
    database: Database, position: SpoolPosition, items: Sequence[object], offset: int
) -> None:
    """Record items one by one; the run's log names those that cannot be recorded."""
    problems = [item.problem for item in items if isinstance(item, Unrecordable)]
    items = [item for item in items if not isinstance(item, Unrecordable)]
    try:
        _record(database, position, items, offset, problems)
    except Exception as error:
        if isinstance(error, HalfstepError) or is_outage(error):
            raise
        # One by one without moving the position, since repeated items are recorded only once.
        for item in items:
            try:
                _record(database, position, [item], position.offset, [])
            except Exception as problem:
                if isinstance(problem, HalfstepError) or is_outage(problem):
                    raise
                traceback.print_exception(problem)
                problems.append(f"{type(problem).__name__}: {safe_repr(item)}")
        _record(database, position, [], offset, problems)


def _record(
    database: Database,
    position: SpoolPosition,
    items: Sequence[Any],
    offset: int,
    problems: Sequence[str],
) -> None:
    remarks = []
    if problems:
        more = f", and {len(problems) - 1:,} more frames" if len(problems) > 1 else ""
        remarks.append(f"some data could not be recorded: {problems[0]}{more}")
    writer, end = position.writer, (position.sequence, offset)

    def record(session: Session) -> None:
        run, at = ingest.lock_attempt(session, position.user, position.run_id, position.attempt)
        ingest.check_position(run, at, writer, position.sequence, position.offset)
        ingest.record(session, run, at, items, end=end, writer=writer, remarks=remarks)

    step_conversion.write(database, record)
