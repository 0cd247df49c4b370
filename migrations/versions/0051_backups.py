"""Backups: which were made, when, where, and how they ended, instead of only those that run."""

import sqlalchemy as sa
from alembic import op

revision = '0051'
down_revision = '0050'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table('running_backups')  # has rows only while one is written
    op.create_table(
        'backups',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('folder', sa.Text(), nullable=False),
        sa.Column('slot', sa.BigInteger(), nullable=True),
        sa.Column('started_at', sa.Double(), nullable=False),
        sa.Column('seen_at', sa.Double(), nullable=False),
        sa.Column('ended_at', sa.Double(), nullable=True),
        sa.Column('error', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_backups'),
        sa.UniqueConstraint('slot', name='uq_backups_slot'),
    )


def downgrade() -> None:
    op.drop_table('backups')
    op.create_table(
        'running_backups',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('seen_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_running_backups'),
    )
