"""The mark of damaged runs. They are checked after the upgrade."""

import sqlalchemy as sa
from alembic import op

revision = '0057'
down_revision = '0056'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('damage', sa.Text(), server_default='', nullable=False))


def downgrade() -> None:
    op.drop_column('runs', 'damage')
