"""Whether a waiting run of higher priority may take the devices of a run, or of a sweep's runs."""

import sqlalchemy as sa
from alembic import op

revision = '0058'
down_revision = '0057'
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ('runs', 'sweeps'):
        op.add_column(
            table, sa.Column('preemptible', sa.Boolean(), server_default=sa.false(), nullable=False)
        )


def downgrade() -> None:
    for table in ('runs', 'sweeps'):
        op.drop_column(table, 'preemptible')
