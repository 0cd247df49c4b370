"""Bulk inserts of whole columns, by the fastest method of each database."""

from collections.abc import Mapping
from itertools import repeat
from typing import Any, TypeAlias

from numpy.typing import NDArray
from sqlalchemy import Connection, FromClause

#: A column of numbers, bytes or strings.
Column: TypeAlias = NDArray[Any] | list[bytes] | list[str]


def replace(
    connection: Connection,
    table: FromClause,
    key: dict[str, Any],
    columns: dict[str, Column],
) -> None:
    """Insert rows and replace those with the same primary key. A NaN becomes NULL.

    key: the part of the primary key that all rows share.
    """
    if connection.dialect.name == "sqlite":
        _insert(connection, table, key, columns, "", verb="INSERT OR REPLACE")
    else:
        primary = tuple(column.name for column in table.primary_key)
        upsert(connection, table, key, columns, conflict=primary)


def upsert(
    connection: Connection,
    table: FromClause,
    key: dict[str, object],
    columns: dict[str, Column],
    *,
    conflict: tuple[str, ...],
    where: str = "",
) -> None:
    """Insert rows, or update those with the same values in the conflict columns.

    No two of the given rows may share these values. Other columns of an existing row, such as its
    id, stay unchanged.
    key: values that all rows share.  conflict: columns with a unique constraint.
    where: SQL condition on `excluded` and the table for an update.
    """
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in conflict)
    update = f"ON CONFLICT ({', '.join(conflict)}) DO UPDATE SET {changed}"
    _insert(connection, table, key, columns, f"{update} WHERE {where}" if where else update)


def _insert(
    connection: Connection,
    table: FromClause,
    key: Mapping[str, object],
    columns: dict[str, Column],
    on_conflict: str,
    verb: str = "INSERT",
) -> None:
    names = ", ".join((*key, *columns))
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * (len(key) + len(columns)))
        statement = f"{verb} INTO {table} ({names}) VALUES ({marks}) {on_conflict}"
        shared = map(repeat, key.values())  # infinite: the columns set the number of rows
        rows = zip(*shared, *map(_to_list, columns.values()), strict=False)
        connection.exec_driver_sql(statement, list(rows))
    else:
        statement = f"""
            INSERT INTO {table} ({names})
            SELECT {", ".join(("%s",) * len(key) + tuple(map(_null_for_nan, columns.items())))}
            FROM unnest({", ".join(map(_array, columns.values()))}) AS rows ({", ".join(columns)})
            {on_conflict}
        """  # noqa: S608
        connection.exec_driver_sql(statement, (*key.values(), *columns.values()))


def _to_list(column: Column) -> list[Any]:
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
