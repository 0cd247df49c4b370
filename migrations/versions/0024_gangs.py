"""Let a run be trained by several nodes: how many, where they meet, and how each of them ended."""

import sqlalchemy as sa
from alembic import op

revision = '0024'
down_revision = '0023'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('runs') as runs:
        runs.add_column(sa.Column('nodes', sa.Integer(), server_default='1', nullable=False))
    with op.batch_alter_table('run_nodes') as nodes:
        nodes.add_column(sa.Column('host', sa.Text()))
        nodes.add_column(sa.Column('port', sa.Integer()))
        nodes.add_column(sa.Column('ending', sa.JSON()))


def downgrade() -> None:
    with op.batch_alter_table('run_nodes') as nodes:
        nodes.drop_column('ending')
        nodes.drop_column('port')
        nodes.drop_column('host')
    with op.batch_alter_table('runs') as runs:
        runs.drop_column('nodes')
