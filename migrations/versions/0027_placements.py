"""Workers that a cluster starts for one run alone, and what is asked of the cluster for each run."""

import sqlalchemy as sa
from alembic import op

revision = '0027'
down_revision = '0026'
branch_labels = None
depends_on = None

OPEN = sa.text('ended_at IS NULL')


def upgrade() -> None:
    op.add_column('workers', sa.Column('only_run_id', sa.Integer()))
    op.add_column('workers', sa.Column('placement', sa.Text()))
    op.create_table(
        'placements',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('nodes', sa.Integer(), nullable=False),
        sa.Column('devices', sa.Integer(), nullable=False),
        sa.Column('tries', sa.Integer(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('placed_at', sa.Double(), nullable=False),
        sa.Column('ended_at', sa.Double()),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_placements_run_id')),
        sa.PrimaryKeyConstraint('run_id', 'attempt', name=op.f('pk_placements')),
    )
    op.create_index('ix_placements_open', 'placements', ['run_id'], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    op.drop_table('placements')
    op.drop_column('workers', 'placement')
    op.drop_column('workers', 'only_run_id')
