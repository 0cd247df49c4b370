"""Let SQLite read lists of runs, whatever they are filtered and sorted by, from one index."""

from alembic import op

revision = '0019'
down_revision = '0018'
branch_labels = None
depends_on = None

TEXTS = ['name', 'recipe', 'precision', 'tags', 'owner_id', 'project']
BEFORE = [*TEXTS, 'status', 'source', 'created_at', 'deleted_at']
NUMBERS = ['step', 'parent_step', 'skipped', 'loss', 'scale', 'priority', 'steps_per_second', 'attempt']
LISTED = [*BEFORE, 'fault', *NUMBERS, 'started_at', 'ended_at', 'stored_bytes']


def upgrade() -> None:
    if op.get_context().dialect.name == 'sqlite':
        op.drop_index('ix_runs_texts', 'runs')
        op.create_index('ix_runs_listed', 'runs', LISTED)


def downgrade() -> None:
    if op.get_context().dialect.name == 'sqlite':
        op.drop_index('ix_runs_listed', 'runs')
        op.create_index('ix_runs_texts', 'runs', BEFORE)
