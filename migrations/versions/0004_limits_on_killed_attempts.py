"""Limits on killed attempts."""

import sqlalchemy as sa
from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('run_nodes', schema=None) as batch_op:
        batch_op.add_column(sa.Column('step_before', sa.BigInteger(), server_default='0', nullable=False))

    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.add_column(sa.Column('killed_attempts', sa.Integer(), server_default='0', nullable=False))
        batch_op.add_column(sa.Column('stalled_attempts', sa.Integer(), server_default='0', nullable=False))



def downgrade() -> None:
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.drop_column('stalled_attempts')
        batch_op.drop_column('killed_attempts')

    with op.batch_alter_table('run_nodes', schema=None) as batch_op:
        batch_op.drop_column('step_before')

