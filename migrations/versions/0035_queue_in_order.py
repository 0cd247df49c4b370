"""The queue's index is in its order: the most urgent first, and then by position.

On PostgreSQL that of the runs that are not in the bin finds those of a time, too.
"""

import sqlalchemy as sa
from alembic import op

revision = '0035'
down_revision = '0034'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index('ix_runs_queue', 'runs')
    op.create_index('ix_runs_queue', 'runs', ['status', sa.text('priority DESC'), 'position', 'id'])
    _index_kept('created_at', 'id')


def downgrade() -> None:
    op.drop_index('ix_runs_queue', 'runs')
    op.create_index('ix_runs_queue', 'runs', ['status', 'priority', 'position'])
    _index_kept('id')


def _index_kept(*columns: str) -> None:
    if op.get_context().dialect.name == 'postgresql':
        op.drop_index('ix_runs_kept', 'runs')
        op.create_index('ix_runs_kept', 'runs', columns, postgresql_where=sa.text('deleted_at IS NULL'))
