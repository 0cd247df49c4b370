"""Numbers of a watched run as JSON lines, which any language can send.

A line is {"step": 10, "loss": 0.5, "val/accuracy": 0.9}. A loss, with the learning rate, gradient
norm and loss scale beside it, is the row of its step, by the names that `halfstep import` knows;
all other numbers are metrics. Sending lines again changes nothing.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from db.database import Database
from db.errors import Ended, Invalid
from db.tables import ENDED, LARGEST_COUNT, Run, User
from db.telemetry import ingest, step_conversion
from db.telemetry.recording import Item
from db.telemetry.step_rows import rows_at
from halfstep.session.nesting import flat
from halfstep.telemetry.event_codec import BadEvent, decode, encode
from halfstep.telemetry.events import Event, Metric, Resumed
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from halfstep.telemetry.plain_json import LARGEST_WHOLE, NONFINITE, safe_repr

MOST_LINES = 1000
#: Items per transaction: the first 1,000 take about 50 ms of SQLite's write lock.
TRANSACTION_ITEMS = 1000
MOST_PROBLEMS = 20
#: Seconds since 1970 at which a line was logged; by default when it is received.
TIME = "time"
LARGEST_TIME = 2**33


class LineProblem(BaseModel):
    """A line, or a number of it, that is not recorded."""

    line: Annotated[int, Field(description="From 1")]
    error: Annotated[str, Field(description="Field, value and allowed values")]


class Logged(BaseModel):
    """Result of a request."""

    lines: Annotated[int, Field(description="Lines without a problem")]
    problems: Annotated[list[LineProblem], Field(description=f"The first {MOST_PROBLEMS}")]


class _Line(NamedTuple):
    number: int
    step: int
    elapsed_ms: int
    numbers: dict[str, float]  # by name

    @property
    def row(self) -> LoggedRow | None:
        """The row of its step, if the line has a loss."""
        return LoggedRow.of(self.step, self.elapsed_ms, self.numbers)


def take(database: Database, user: User, run_id: int, body: bytes) -> Logged:
    """Record the lines of a body. Raises Invalid, NotFound, NotOwner, Ended."""
    texts = body.splitlines()
    if len(texts) > MOST_LINES:
        raise Invalid({"body": f"{len(texts):,} lines; allowed: at most {MOST_LINES:,}"})
    problems: list[LineProblem] = []
    with database.reading() as session:
        run = session.get(Run, run_id)
        if run is None:
            raise ingest.not_found(run_id)
        attempt = run.attempt
        lines = list(_lines(texts, run.started_at or 0.0, problems))
    metrics = list(_metrics(lines, problems))
    for first in range(0, max(len(metrics), 1), TRANSACTION_ITEMS):
        record = partial(
            _record,
            user=user,
            run_id=run_id,
            attempt=attempt,
            lines=lines if first == 0 else [],
            metrics=metrics[first : first + TRANSACTION_ITEMS],
        )
        problems += step_conversion.write(database, record)
    problems.sort(key=lambda problem: problem.line)
    sound = {line.number for line in lines} - {problem.line for problem in problems}
    return Logged(lines=len(sound), problems=problems[:MOST_PROBLEMS])


def _record(
    session: Session,
    *,
    user: User,
    run_id: int,
    attempt: int,
    lines: Sequence[_Line],
    metrics: Sequence[Event],
) -> list[LineProblem]:
    """Record the steps of lines, and metrics; return the problems of steps."""
    problems: list[LineProblem] = []
    run, place = ingest.lock_attempt(session, user, run_id, attempt)
    if run.status in ENDED:
        raise Ended(f"Run {run_id} has ended: it accepts no more lines.")
    steps = _steps(session, run, lines, problems) if lines else ()
    ingest.record(session, run, place, [*steps, *metrics], end=(place.sequence, place.offset))
    return problems


def _steps(
    session: Session, run: Run, lines: Sequence[_Line], problems: list[LineProblem]
) -> Iterator[Item]:
    """Yield the rows of new steps; of a later attempt first the step that it continues from."""
    logged = [(line, row) for line in lines if (row := line.row)]
    last_step = run.step
    if logged and run.attempt > 1 and run.resumed_step is None:
        last_step = logged[0][0].step - 1
        yield Resumed(step=last_step, exact=False, notes=["continued by JSON lines"])
    last = next(iter(rows_at(session, run.id, [last_step])), None)
    known: dict[int, float | None] = {}
    if any(row.step <= last_step for _, row in logged):
        stored = rows_at(session, run.id, {row.step for _, row in logged})
        known = {row.step: row.loss for row in stored}
    rows: list[LoggedRow] = []
    for line, row in logged:
        if row.step > last_step:
            rows.append(row)
            last_step, known[row.step] = row.step, row.loss
        elif not _is_same(row.loss, known.get(row.step, "none")):
            allowed = f"after {last_step:,}, the last step with a loss"
            problems.append(
                LineProblem(line=line.number, error=f"step is {row.step}; allowed: {allowed}")
            )
    if rows:
        yield rows_of(rows, (last.step, last.elapsed_ms) if last else None)


def _is_same(loss: float, stored: float | str | None) -> bool:
    """Return whether a loss is the one that is stored, as float32; None: not finite."""
    if isinstance(stored, str):
        return False
    if stored is None or not math.isfinite(stored):
        return not math.isfinite(np.float32(loss))
    return bool(np.float32(loss) == np.float32(stored))


def _lines(
    texts: Sequence[bytes], started_at: float, problems: list[LineProblem]
) -> Iterator[_Line]:
    received = time.time()
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            yield _line(number, text, started_at, received)
        except ValueError as error:
            problems.append(LineProblem(line=number, error=str(error)))


def _line(number: int, text: bytes, started_at: float, received: float) -> _Line:
    """Parse a line. Raises ValueError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{safe_repr(fields)} is not valid; allowed: an object of numbers")
    step, moment = fields.pop("step", None), fields.pop(TIME, received)
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    if type(step) is not int or not 0 <= step <= LARGEST_COUNT:
        raise ValueError(f"step is {safe_repr(step)}; allowed: a whole number from 0")
    if not _is_number(moment) or not 0 <= moment <= LARGEST_TIME:
        raise ValueError(f"{TIME} is {safe_repr(moment)}; allowed: seconds since 1970")
    numbers = {}
    for name, value in flat(fields, "/").items():
        if value in NONFINITE:
            value = float(value)
        if not _is_number(value):
            allowed = f"a number, or as text {', '.join(NONFINITE)}"
            raise ValueError(f"{name:.100} is {safe_repr(value)}; allowed: {allowed}")
        numbers[name] = float(value)
    return _Line(number, step, round((moment - started_at) * 1000), numbers)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= LARGEST_WHOLE
    return isinstance(value, float)


def _metrics(lines: Sequence[_Line], problems: list[LineProblem]) -> Iterator[Event]:
    for line in lines:
        in_row = line.row.columns.keys() if line.row else set()
        for name in sorted(line.numbers.keys() - in_row):
            value, elapsed_ms = line.numbers[name], line.elapsed_ms
            metric = Metric(step=line.step, name=name, value=value, elapsed_ms=elapsed_ms)
            try:
                yield decode(encode(metric))  # which checks the bounds
            except BadEvent as error:
                problems.append(LineProblem(line=line.number, error=str(error)))
