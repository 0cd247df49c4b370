"""Shared helpers that count the cost of queries."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import event

from db.database import Database

INSTRUCTIONS = 100


@contextmanager
def count_instructions(database: Database) -> Iterator[list[int]]:
    """Count SQLite's virtual machine instructions in hundreds, which is more exact than a clock."""
    hundreds = [0]

    def tick() -> int:
        hundreds[0] += 1
        return 0

    def listen(connection: object, *_: object) -> None:
        connection.set_progress_handler(tick, INSTRUCTIONS)  # type: ignore[attr-defined]

    event.listen(database.engine, "checkout", listen)
    yield hundreds
    event.remove(database.engine, "checkout", listen)


@contextmanager
def collect_queries(database: Database) -> Iterator[list[str]]:
    """Collect the executed queries, except BEGIN, which only SQLite gets."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    yield statements
    event.remove(database.engine, "before_cursor_execute", note)
