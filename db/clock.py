"""The database's clock."""

from typing import Any

from sqlalchemy import Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function that it is
    """The database's clock in seconds since the epoch: leases do not depend on workers' clocks."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_on_sqlite(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_on_postgresql(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "(extract(epoch from clock_timestamp())::double precision)"


def current(session: Session) -> float:
    """Return the time of the database's clock, for a condition that an index can use."""
    return session.scalars(select(now())).one()
