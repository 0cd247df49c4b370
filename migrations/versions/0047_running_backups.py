"""Backups that are being written, during which no file that their rows name is deleted."""

import sqlalchemy as sa
from alembic import op

revision = '0047'
down_revision = '0046'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'running_backups',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('seen_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_running_backups'),
    )


def downgrade() -> None:
    op.drop_table('running_backups')
