"""Memory of the process that a worker's trainings are forked from."""

import sqlalchemy as sa
from alembic import op

revision = '0045'
down_revision = '0044'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('workers', sa.Column('warm_memory_bytes', sa.BigInteger()))


def downgrade() -> None:
    op.drop_column('workers', 'warm_memory_bytes')
