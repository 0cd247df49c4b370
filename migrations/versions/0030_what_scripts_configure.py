"""What the script of a command says that it is configured with."""

import sqlalchemy as sa
from alembic import op

revision = '0030'
down_revision = '0029'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('script_config', sa.JSON()))


def downgrade() -> None:
    op.drop_column('runs', 'script_config')
