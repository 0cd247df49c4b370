"""Runs that are watched: how far each attempt has come in, files that did not, tokens that write."""

import sqlalchemy as sa
from alembic import op

revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None

FILES = ('checkpoints', 'artifacts')


def upgrade() -> None:
    op.add_column('api_tokens', sa.Column('kind', sa.Text(), server_default='full', nullable=False))
    op.add_column('runs', sa.Column('source', sa.Text(), server_default='recipe', nullable=False))
    op.add_column('runs', sa.Column('project', sa.Text(), server_default='', nullable=False))
    op.add_column('runs', sa.Column('watch_id', sa.Text(), nullable=True))
    op.add_column('runs', sa.Column('heard_at', sa.Double(), nullable=True))
    op.create_index('ix_runs_watch_id', 'runs', ['owner_id', 'watch_id'], unique=True)
    for table in FILES:
        op.add_column(table, sa.Column('path', sa.Text(), nullable=True))
    with op.batch_alter_table('run_nodes') as nodes:
        nodes.alter_column('worker_id', existing_type=sa.Integer(), nullable=True)
        nodes.alter_column('lease_expires_at', existing_type=sa.Double(), nullable=True)
    op.create_table('watched_attempts',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('host', sa.Text(), nullable=False),
    sa.Column('versions', sa.JSON(), nullable=False),
    sa.Column('sequence', sa.BigInteger(), nullable=False),
    sa.Column('offset', sa.BigInteger(), nullable=False),
    sa.Column('resumed', sa.JSON(), nullable=True),
    sa.Column('early', sa.JSON(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_watched_attempts_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name=op.f('pk_watched_attempts'))
    )


def downgrade() -> None:
    op.drop_table('watched_attempts')
    nodes = sa.table('run_nodes', sa.column('worker_id', sa.Integer))
    op.execute(sa.delete(nodes).where(nodes.c.worker_id.is_(None)))
    with op.batch_alter_table('run_nodes') as batch_op:
        batch_op.alter_column('worker_id', existing_type=sa.Integer(), nullable=False)
        batch_op.alter_column('lease_expires_at', existing_type=sa.Double(), nullable=False)
    for table in FILES:
        with op.batch_alter_table(table) as batch_op:
            batch_op.drop_column('path')
    op.drop_index('ix_runs_watch_id', 'runs')
    # Its configuration is anybody's; an earlier version reads a precision out of each.
    runs = sa.table('runs', sa.column('source', sa.Text), sa.column('config', sa.JSON))
    plain = {'precision': 'fp32', 'training': {}}
    op.execute(sa.update(runs).where(runs.c.source == 'watch').values(config=plain))
    with op.batch_alter_table('runs') as batch_op:
        for column in ('heard_at', 'watch_id', 'project', 'source'):
            batch_op.drop_column(column)
    with op.batch_alter_table('api_tokens') as batch_op:
        batch_op.drop_column('kind')
