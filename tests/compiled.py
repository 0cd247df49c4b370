"""SQL compiled for one test's database, reused for those of later tests.

A server compiles each of its statements once in its life. A test has a `Database` of its own, which
would compile all that it executes: a fifth of what tests/app took, of some files half.
"""

from typing import Any

from db.database import Database

#: By kind, of the first database that was shared: what SQLAlchemy knows its statements by.
_known: dict[str, tuple[Any, Any]] = {}


def share(database: Database) -> None:
    """Let a database use statements that others of its kind have compiled."""
    engine = database.engine
    if engine.name not in _known:
        database.check()  # only then does its dialect know what the server can do
    dialect, statements = _known.setdefault(engine.name, (engine.dialect, engine._compiled_cache))
    for each in (engine, database._reader, database._autocommit, database._writer):
        each.dialect, each._compiled_cache = dialect, statements
