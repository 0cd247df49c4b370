"""The time at which a run was last checked for damage: all are due after the upgrade."""

import sqlalchemy as sa
from alembic import op

revision = '0059'
down_revision = '0058'
branch_labels = None
depends_on = None


def upgrade() -> None:
    checked_at = sa.Column('damage_checked_at', sa.Double(), server_default='0', nullable=False)
    op.add_column('runs', checked_at)


def downgrade() -> None:
    op.drop_column('runs', 'damage_checked_at')
