"""Parquet files with the steps of runs that have ended."""

import sqlalchemy as sa
from alembic import op

revision = '0044'
down_revision = '0043'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'frozen_steps',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('key', sa.Text(), nullable=False),
        sa.Column('path', sa.Text()),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('sha256', sa.Text(), nullable=False),
        sa.Column('revision', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('footer_sha256', sa.Text(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('is_settled', sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_frozen_steps_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_frozen_steps'),
        sa.UniqueConstraint('run_id', name='uq_frozen_steps_run_id'),
    )


def downgrade() -> None:
    # The files stay in the store; an earlier version cannot read them.
    op.drop_table('frozen_steps')
