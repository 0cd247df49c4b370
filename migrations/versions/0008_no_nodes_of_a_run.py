"""No nodes of a run: nobody read how many there were to be."""

import sqlalchemy as sa
from alembic import op

revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('runs') as runs:
        runs.drop_column('nodes')


def downgrade() -> None:
    with op.batch_alter_table('runs') as runs:
        runs.add_column(sa.Column('nodes', sa.Integer(), nullable=False, server_default='1'))
