"""Run the migrations on the engine that db.Database hands over, or print them as SQL.

SQLite alters a table by building it anew and dropping the old one. With foreign keys on, dropping
one that others point to is an error, and whether they are on is settled before a transaction
begins: so they are off meanwhile, and what was broken is found before the commit.
"""

from alembic import context
from sqlalchemy import Connection, func, select

from db.tables import Table

MIGRATION_LOCK = 0x68616C66  # any number that nobody else uses: "half"


def print_sql() -> None:
    """Print what would be done."""
    url = context.config.get_main_option("sqlalchemy.url")
    context.configure(url=url, target_metadata=Table.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def migrate() -> None:
    """Do it in one transaction."""
    with context.config.attributes["engine"].connect() as connection:
        is_sqlite = connection.dialect.name == "sqlite"
        if is_sqlite:
            connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                if not is_sqlite:  # two that start at once take turns
                    connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                _run(connection)
        finally:
            if is_sqlite:
                connection.connection.cursor().execute("PRAGMA foreign_keys=ON")


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Table.metadata, render_as_batch=True)
    before = context.get_context().get_current_revision()
    context.run_migrations()
    is_changed = context.get_context().get_current_revision() != before
    if is_changed and connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if broken:
            raise RuntimeError(f"rows point to rows that are not there: {broken[:10]}")


if context.is_offline_mode():
    print_sql()
else:
    migrate()
