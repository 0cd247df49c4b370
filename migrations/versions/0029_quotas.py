"""What projects may use at once, and which share of the devices is theirs."""

import sqlalchemy as sa
from alembic import op

revision = '0029'
down_revision = '0028'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('projects', sa.Column('devices', sa.Integer()))
    op.add_column('projects', sa.Column('queued', sa.Integer()))
    op.add_column('projects', sa.Column('stored_gib', sa.Double()))
    op.add_column('projects', sa.Column('share', sa.Double(), nullable=False, server_default='1.0'))


def downgrade() -> None:
    for name in ('share', 'stored_gib', 'queued', 'devices'):
        op.drop_column('projects', name)
