"""Of a sweep, the command that its runs are; none of a recipe's."""

import sqlalchemy as sa
from alembic import op

revision = '0033'
down_revision = '0032'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('sweeps', sa.Column('command', sa.JSON()))


def downgrade() -> None:
    # An earlier version would look for a recipe without a name, and fail at it.
    op.execute("UPDATE sweeps SET status = 'cancelled' WHERE recipe = ''")
    op.drop_column('sweeps', 'command')
