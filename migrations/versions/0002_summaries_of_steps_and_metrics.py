"""Summaries of steps and metrics."""

import sqlalchemy as sa
from alembic import op

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('metric_buckets',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('size', sa.BigInteger(), nullable=False),
    sa.Column('bucket', sa.BigInteger(), nullable=False),
    sa.Column('summary', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_metric_buckets_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'name', 'size', 'bucket', name=op.f('pk_metric_buckets')),
    sqlite_with_rowid=False
    )
    op.create_table('step_buckets',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('size', sa.BigInteger(), nullable=False),
    sa.Column('bucket', sa.BigInteger(), nullable=False),
    sa.Column('summary', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_step_buckets_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'size', 'bucket', name=op.f('pk_step_buckets')),
    sqlite_with_rowid=False
    )
    with op.batch_alter_table('steps', schema=None, table_kwargs={'sqlite_with_rowid': False}) as batch_op:
        batch_op.create_index('ix_steps_nonfinite', ['run_id', 'step', 'flags'], unique=False, sqlite_where=sa.text('(flags & 2) <> 0'), postgresql_where=sa.text('(flags & 2) <> 0'))
        batch_op.create_index('ix_steps_skipped', ['run_id', 'step', 'flags'], unique=False, sqlite_where=sa.text('(flags & 1) <> 0'), postgresql_where=sa.text('(flags & 1) <> 0'))
        batch_op.drop_constraint(batch_op.f('fk_steps_run_id'), type_='foreignkey')


def downgrade() -> None:
    with op.batch_alter_table('steps', schema=None, table_kwargs={'sqlite_with_rowid': False}) as batch_op:
        batch_op.create_foreign_key(batch_op.f('fk_steps_run_id'), 'runs', ['run_id'], ['id'])
        batch_op.drop_index('ix_steps_skipped', sqlite_where=sa.text('(flags & 1) <> 0'), postgresql_where=sa.text('(flags & 1) <> 0'))
        batch_op.drop_index('ix_steps_nonfinite', sqlite_where=sa.text('(flags & 2) <> 0'), postgresql_where=sa.text('(flags & 2) <> 0'))

    op.drop_table('step_buckets')
    op.drop_table('metric_buckets')
