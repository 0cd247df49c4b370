"""A note of each run, what its files take, and a bin for runs that are deleted."""

import sqlalchemy as sa
from alembic import op

revision = '0013'
down_revision = '0012'
branch_labels = None
depends_on = None

FILES = ('checkpoints', 'artifacts')
TEXTS = ['name', 'recipe', 'precision', 'tags', 'owner_id', 'project', 'status', 'source', 'created_at']
IN_BIN = sa.text('deleted_at IS NOT NULL AND erased_at IS NULL')


def upgrade() -> None:
    op.add_column('runs', sa.Column('note', sa.Text(), server_default='', nullable=False))
    op.add_column('runs', sa.Column('stored_bytes', sa.BigInteger(), server_default='0', nullable=False))
    op.add_column('runs', sa.Column('deleted_at', sa.Double(), nullable=True))
    op.add_column('runs', sa.Column('erasing', sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column('runs', sa.Column('erased_at', sa.Double(), nullable=True))
    index_texts([*TEXTS, 'deleted_at'])
    op.create_index('ix_runs_deleted_at', 'runs', ['deleted_at'], sqlite_where=IN_BIN, postgresql_where=IN_BIN)
    runs = sa.table('runs', sa.column('id'), sa.column('stored_bytes'))
    total = sa.literal(0)
    for name in FILES:
        files = sa.table(name, sa.column('run_id'), sa.column('key'), sa.column('size_bytes'))
        taken = sa.select(sa.func.coalesce(sa.func.sum(files.c.size_bytes), 0))
        total += taken.where(files.c.run_id == runs.c.id, files.c.key != '').scalar_subquery()
    op.execute(sa.update(runs).values(stored_bytes=total))


def index_texts(columns: list[str]) -> None:
    if op.get_context().dialect.name == 'sqlite':
        op.drop_index('ix_runs_texts', 'runs')
        op.create_index('ix_runs_texts', 'runs', columns)


def downgrade() -> None:
    # What an earlier version cannot tell from a run shall be one that it leaves to itself.
    runs = sa.table('runs', *(sa.column(name) for name in ('source', 'name', 'erased_at')))
    erased = sa.update(runs).where(runs.c.erased_at.is_not(None))
    op.execute(erased.values(source='watch', name='deleted'))
    op.drop_index('ix_runs_deleted_at', 'runs')
    index_texts(TEXTS)
    for column in ('erased_at', 'erasing', 'deleted_at', 'stored_bytes', 'note'):
        op.drop_column('runs', column)
