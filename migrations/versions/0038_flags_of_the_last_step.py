"""The flags of each run's last step, and an index of the steps that the loop left out."""

import sqlalchemy as sa
from alembic import op

revision = '0038'
down_revision = '0037'
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ('not_stepped', 'zero_steps', 'last_flags'):
        op.add_column('runs', sa.Column(name, sa.BigInteger(), nullable=False, server_default='0'))
    op.execute(
        'UPDATE runs SET last_flags = 2'
        ' WHERE step > 0 AND (loss IS NULL OR abs(loss) > 1.7976931348623157e308)'
    )
    condition = sa.text('(flags & 8) <> 0')
    op.create_index(
        'ix_steps_not_stepped',
        'steps',
        ['run_id', 'step'],
        sqlite_where=condition,
        postgresql_where=condition,
    )


def downgrade() -> None:
    op.drop_index('ix_steps_not_stepped', table_name='steps')
    for name in ('last_flags', 'zero_steps', 'not_stepped'):
        op.drop_column('runs', name)
