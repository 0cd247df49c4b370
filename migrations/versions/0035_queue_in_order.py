"""The queue's index is in its order: the most urgent first, and then by position."""

import sqlalchemy as sa
from alembic import op

revision = '0035'
down_revision = '0034'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index('ix_runs_queue', 'runs')
    op.create_index('ix_runs_queue', 'runs', ['status', sa.text('priority DESC'), 'position', 'id'])


def downgrade() -> None:
    op.drop_index('ix_runs_queue', 'runs')
    op.create_index('ix_runs_queue', 'runs', ['status', 'priority', 'position'])
