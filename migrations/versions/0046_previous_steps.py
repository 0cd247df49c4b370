"""Key of the file before the newest file of a run's steps."""

import sqlalchemy as sa
from alembic import op

revision = '0046'
down_revision = '0045'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('frozen_steps', sa.Column('previous_key', sa.Text()))


def downgrade() -> None:
    op.drop_column('frozen_steps', 'previous_key')
