"""Say of each worker whether its runs are walled off; of whoever was there before nothing is known."""

import sqlalchemy as sa
from alembic import op

revision = '0023'
down_revision = '0022'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('workers') as workers:
        workers.add_column(sa.Column('walls_stand', sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    with op.batch_alter_table('workers') as workers:
        workers.drop_column('walls_stand')
