"""Installed packages in the environment of an attempt."""

import sqlalchemy as sa
from alembic import op

revision = '0050'
down_revision = '0049'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('run_environments', sa.Column('requirements', sa.LargeBinary()))


def downgrade() -> None:
    op.drop_column('run_environments', 'requirements')
