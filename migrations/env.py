"""Run the migrations on the connection that db.Database hands over."""

from alembic import context

from db.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
)
context.run_migrations()
