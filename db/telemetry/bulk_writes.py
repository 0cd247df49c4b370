"""Write whole columns at once, the fastest way that each database has."""

from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import Connection, FromClause

#: Of numbers, of bytes, or of texts.
Column: TypeAlias = NDArray[Any] | list[bytes] | list[str]


def replace(
    connection: Connection,
    table: FromClause,
    key: dict[str, Any],
    columns: dict[str, Column],
    *,
    are_new: bool = False,
) -> None:
    """Insert rows, in place of those that have the same primary key. A NaN becomes NULL.

    key: the part of the primary key that all these rows share.  are_new: the caller knows that
    there are none such, which spares PostgreSQL a third of the time.
    """
    if connection.dialect.name == "sqlite":
        _insert(connection, table, key, columns, "", verb="INSERT OR REPLACE")
    elif are_new:
        _insert(connection, table, key, columns, "")
    else:
        primary = tuple(column.name for column in table.primary_key)
        upsert(connection, table, key, columns, conflict=primary)


def upsert(
    connection: Connection,
    table: FromClause,
    key: dict[str, Any],
    columns: dict[str, Column],
    *,
    conflict: tuple[str, ...],
    where: str = "",
) -> None:
    """Insert rows, or update those that have the same values in a unique set of columns.

    No two of the rows may have them. Other columns of a row that is there stay, its id above all.
    key: values that all rows share.  where: SQL on `excluded` and the table, to update or not.
    """
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in conflict)
    update = f"ON CONFLICT ({', '.join(conflict)}) DO UPDATE SET {changed}"
    _insert(connection, table, key, columns, f"{update} WHERE {where}" if where else update)


def _insert(
    connection: Connection,
    table: FromClause,
    key: dict[str, Any],
    columns: dict[str, Column],
    on_conflict: str,
    verb: str = "INSERT",
) -> None:
    names = ", ".join((*key, *columns))
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * (len(key) + len(columns)))
        statement = f"{verb} INTO {table} ({names}) VALUES ({marks}) {on_conflict}"
        shared = map(repeat, key.values())  # without end: the columns decide how many rows
        rows = zip(*shared, *map(_listed, columns.values()), strict=False)
        connection.exec_driver_sql(statement, list(rows))
    else:
        statement = f"""
            INSERT INTO {table} ({names})
            SELECT {", ".join(("%s",) * len(key) + tuple(map(_null_for_nan, columns.items())))}
            FROM unnest({", ".join(map(_array, columns.values()))}) AS rows ({", ".join(columns)})
            {on_conflict}
        """  # noqa: S608
        connection.exec_driver_sql(statement, (*key.values(), *columns.values()))


def _listed(column: Column) -> list[Any]:
    return column if isinstance(column, list) else column.tolist()


def _null_for_nan(item: tuple[str, Column]) -> str:
    name, column = item
    return f"nullif(rows.{name}, 'NaN')" if _is_float(column) else f"rows.{name}"


def _array(column: Column) -> str:
    if isinstance(column, list):
        return "%s::text[]" if isinstance(column[0], str) else "%s::bytea[]"
    return "%s::float8[]" if _is_float(column) else "%s::bigint[]"


def _is_float(column: Column) -> bool:
    return not isinstance(column, list) and column.dtype.kind == "f"


class _ArrayDumper(Dumper):
    """Sends numbers as PostgreSQL's binary array, with no Python object for each of them."""

    format = Format.BINARY

    def dump(self, array: NDArray[Any]) -> bytes:
        oid, kind = (701, ">f8") if _is_float(array) else (20, ">i8")
        items = np.empty(len(array), dtype=[("size_bytes", ">i4"), ("value", kind)])
        items["size_bytes"], items["value"] = 8, array
        # One dimension, no NULLs, the type of an element; then the length, counted from 1.
        return np.array([1, 0, oid, len(array), 1], dtype=">i4").tobytes() + items.tobytes()


psycopg.adapters.register_dumper(np.ndarray, _ArrayDumper)
