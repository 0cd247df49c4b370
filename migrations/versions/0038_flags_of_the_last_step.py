"""The flags of each run's last step, and an index of the steps that the loop left out."""

import sqlalchemy as sa
from alembic import op

revision = '0038'
down_revision = '0037'
branch_labels = None
depends_on = None

TEXTS = ['name', 'recipe', 'precision', 'tags', 'owner_id', 'project']
BEFORE = [*TEXTS, 'status', 'source', 'created_at', 'deleted_at', 'fault', 'step', 'parent_step', 'skipped',
          'loss', 'scale', 'priority', 'steps_per_second']
AFTER = ['attempt', 'started_at', 'ended_at', 'stored_bytes']


def relist(columns: list[str]) -> None:
    """Make the index of what SQLite's lists of runs read."""
    if op.get_context().dialect.name == 'sqlite':
        op.drop_index('ix_runs_listed', 'runs')
        op.create_index('ix_runs_listed', 'runs', columns)


def upgrade() -> None:
    for name in ('not_stepped', 'zero_steps', 'last_flags'):
        op.add_column('runs', sa.Column(name, sa.BigInteger(), nullable=False, server_default='0'))
    op.execute(
        'UPDATE runs SET last_flags = 2'
        ' WHERE step > 0 AND (loss IS NULL OR abs(loss) > 1.7976931348623157e308)'
    )
    relist([*BEFORE, 'last_flags', *AFTER])
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
    relist([*BEFORE, *AFTER])
    for name in ('last_flags', 'zero_steps', 'not_stepped'):
        op.drop_column('runs', name)
