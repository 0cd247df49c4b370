"""Let a saved view group the runs."""

import sqlalchemy as sa
from alembic import op

revision = '0020'
down_revision = '0019'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('saved_views', schema=None) as batch_op:
        batch_op.add_column(sa.Column('group', sa.Text(), server_default='', nullable=False))


def downgrade() -> None:
    with op.batch_alter_table('saved_views', schema=None) as batch_op:
        batch_op.drop_column('group')
