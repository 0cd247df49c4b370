"""X axes that scripts define, which were a setting of the run's configuration."""

import sqlalchemy as sa
from alembic import op

revision = '0054'
down_revision = '0053'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('step_metrics', sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('runs') as runs:
        runs.drop_column('step_metrics')
