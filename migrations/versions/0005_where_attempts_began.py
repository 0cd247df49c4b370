"""Where attempts began."""

import sqlalchemy as sa
from alembic import op

revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('run_nodes', schema=None) as batch_op:
        batch_op.add_column(sa.Column('resumed_step', sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('run_nodes', schema=None) as batch_op:
        batch_op.drop_column('resumed_step')
