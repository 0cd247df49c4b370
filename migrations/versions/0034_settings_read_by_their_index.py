"""On PostgreSQL, settings are read by their index alone, and runs counted by one of their own."""

import sqlalchemy as sa
from alembic import op

revision = '0034'
down_revision = '0033'
branch_labels = None
depends_on = None

KEY_OF = (
    'ALTER TABLE run_settings DROP CONSTRAINT pk_run_settings,'
    ' ADD CONSTRAINT pk_run_settings PRIMARY KEY (name, path, run_id)'
)


def upgrade() -> None:
    if op.get_context().dialect.name == 'postgresql':
        op.execute(f'{KEY_OF} INCLUDE (number, text)')
        op.create_index('ix_runs_kept', 'runs', ['id'], postgresql_where=sa.text('deleted_at IS NULL'))


def downgrade() -> None:
    if op.get_context().dialect.name == 'postgresql':
        op.drop_index('ix_runs_kept', 'runs')
        op.execute(KEY_OF)
