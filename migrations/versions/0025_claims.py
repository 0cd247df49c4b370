"""Let a claim take several workers' devices, and keep what comes free for a run that waits for it."""

import sqlalchemy as sa
from alembic import op

revision = '0025'
down_revision = '0024'
branch_labels = None
depends_on = None

OPEN = sa.text('ended_at IS NULL')


def upgrade() -> None:
    op.add_column('runs', sa.Column('expected_seconds', sa.Double()))
    op.add_column('runs', sa.Column('first_since', sa.Double()))
    op.add_column('runs', sa.Column('reservation', sa.JSON()))
    # A worker says both again when it starts, as it does with this version.
    op.add_column('workers', sa.Column('precisions', sa.JSON(), server_default='[]', nullable=False))
    op.add_column('workers', sa.Column('device_memory_bytes', sa.Double(), server_default='0', nullable=False))
    op.add_column('sweeps', sa.Column('nodes', sa.Integer(), server_default='1', nullable=False))
    op.create_index('ix_run_nodes_open', 'run_nodes', ['worker_id'], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    op.drop_index('ix_run_nodes_open', 'run_nodes')
    op.drop_column('sweeps', 'nodes')
    op.drop_column('workers', 'device_memory_bytes')
    op.drop_column('workers', 'precisions')
    for column in ('reservation', 'first_since', 'expected_seconds'):
        op.drop_column('runs', column)
