"""Export of a run's recorded data as CSV or Parquet.

Files are yielded in pieces: each page is read in its own transaction and discarded once it is
sent, so neither a long run nor a slow reader uses memory or keeps a transaction open.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, FromClause, func, select, tuple_

from db.database import Database
from db.tables import Metric, ScalerEvent, Step
from db.telemetry import metric_blocks
from db.telemetry.pyramid import END
from db.telemetry.step_rows import StepRow, read_rows
from halfstep.telemetry.plain_json import json_safe

PAGE_ROWS = 20_000
#: First characters of text that spreadsheets would evaluate as a formula.
FORMULAS = ("=", "+", "-", "@", "\t", "\r")

#: The table of each export and the columns that order its rows.
EXPORTS: dict[str, tuple[FromClause, tuple[str, ...]]] = {
    "steps": (Step.__table__, ("step",)),
    "events": (ScalerEvent.__table__, ("step", "kind", "optimizer")),
    "metrics": (Metric.__table__, ("name", "step")),  # in blocks, with these columns
}


def as_csv(database: Database, run_id: int, name: str) -> Iterator[bytes]:
    """Yield one of EXPORTS as CSV.

    NaN and infinities are written by name, what is unknown as an empty cell, culprits separated by
    spaces. Text that a spreadsheet would evaluate as a formula is prefixed with '.
    """
    columns = _columns(name)
    yield _csv([[column.name for column in columns]])
    written = [_IN_CSV.get(column.type.python_type, _as_it_is) for column in columns]
    for rows in _pages(database, run_id, name, columns):
        yield _csv(
            [write(value) for write, value in zip(written, row, strict=True)] for row in rows
        )


def as_parquet(database: Database, run_id: int, name: str) -> Iterator[bytes]:
    """Yield one of EXPORTS as Parquet, with one row group per page."""
    import pyarrow as pa  # deferred: uses 30 MiB, needed only for exports
    from pyarrow import parquet

    columns = _columns(name)
    types = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    culprits = pa.list_(pa.string())
    schema = pa.schema([(c.name, types.get(c.type.python_type, culprits)) for c in columns])
    converters = [_IN_PARQUET.get(column.type.python_type, _as_it_is) for column in columns]
    sink = _Sink()
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        for rows in _pages(database, run_id, name, columns):
            arrays = [
                pa.array(map(convert, values), field.type)
                for convert, values, field in zip(
                    converters, zip(*rows, strict=True), schema, strict=True
                )
            ]
            writer.write_table(pa.table(arrays, schema=schema))
            yield sink.take()
    yield sink.take()


def _columns(name: str) -> list[ColumnElement[Any]]:
    table, _ = EXPORTS[name]
    columns: list[ColumnElement[Any]] = []
    for column in table.c:
        if column.name == "grad_norm_clipped":  # NULL where the clip changed nothing
            column = func.coalesce(column, table.c.grad_norm).label(column.name)
        if column.name not in ("id", "run_id"):
            columns.append(column)
    return columns


def _pages(
    database: Database, run_id: int, name: str, columns: list[ColumnElement[Any]]
) -> Iterator[Sequence[Sequence[object]]]:
    if name == "steps":
        yield from _step_pages(database, run_id)
        return
    if name == "metrics":
        yield from _metric_pages(database, run_id)
        return
    table, names = EXPORTS[name]
    key = [table.c[name] for name in names]
    query = select(*columns).where(table.c.run_id == run_id).order_by(*key).limit(PAGE_ROWS)
    page = query
    while True:
        with database.reading() as session:
            rows = session.execute(page).all()
        if rows:
            yield rows
        if len(rows) < PAGE_ROWS:
            return
        page = query.where(tuple_(*key) > tuple_(*(getattr(rows[-1], name) for name in names)))


def _step_pages(database: Database, run_id: int) -> Iterator[Sequence[StepRow]]:
    first, rows = -END, None
    while rows is None or len(rows) == PAGE_ROWS:
        with database.reading() as session:
            rows = read_rows(session, run_id, first=first, most=PAGE_ROWS)
        if rows:
            yield [row.with_nan() for row in rows]
            first = rows[-1].step + 1


def _metric_pages(database: Database, run_id: int) -> Iterator[Sequence[Sequence[object]]]:
    after, rows = ("", -END), None
    while rows is None or len(rows) == PAGE_ROWS:
        with database.reading() as session:
            rows = metric_blocks.page(session.connection(), run_id, after=after, limit=PAGE_ROWS)
        if rows:
            yield [(row.name, row.step, row.value, row.elapsed_ms) for row in rows]
            after = rows[-1].name, rows[-1].step


def _csv(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _as_text(text: str | None) -> str | None:
    """Make text safe for spreadsheets: one line, never a formula."""
    if not text:
        return text
    return ("'" if text.startswith(FORMULAS) else "") + text.replace("\r", " ")


def _as_it_is(value: object) -> object:
    return value


def _names(culprits: list[dict[str, Any]]) -> list[str]:
    return [culprit["name"] for culprit in culprits]


_IN_CSV: dict[type, Callable[[Any], object]] = {
    float: json_safe,
    object: lambda culprits: _as_text(" ".join(_names(culprits))),
    str: _as_text,
}
_IN_PARQUET: dict[type, Callable[[Any], object]] = {object: _names}


class _Sink(io.RawIOBase):
    """Write-only file whose content is taken out in pieces while it is written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._pieces.append(bytes(piece))
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
