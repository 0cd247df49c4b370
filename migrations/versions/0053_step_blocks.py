"""Blocks of steps. The steps of existing runs move into them after the upgrade, run by run."""

import sqlalchemy as sa
from alembic import op

from db.telemetry import block_codec

revision = '0053'
down_revision = '0052'
branch_labels = None
depends_on = None

HAS_STEPS = """
    INSERT INTO step_conversions (run_id, is_verified) SELECT id, false FROM runs
    WHERE EXISTS (SELECT 1 FROM steps WHERE run_id = runs.id)
    OR EXISTS (SELECT 1 FROM frozen_steps WHERE run_id = runs.id)
    OR status IN ({active})
"""
# Processes of the earlier version may still record rows of these, until their attempt ends.
IS_ACTIVE = """
    UPDATE step_conversions SET attempt = (
        SELECT attempt FROM runs WHERE id = run_id AND status IN ({active}) AND source <> 'watch'
    )
"""
ACTIVE = "'starting', 'running', 'pausing', 'stopping', 'unreachable'"
LAST_ELAPSED = """
    UPDATE runs SET last_elapsed_ms = (
        SELECT elapsed_ms FROM steps WHERE run_id = runs.id ORDER BY step DESC LIMIT 1
    )
"""
LOST_SINCE = """
    UPDATE runs SET lost_since = coalesce(
        (SELECT step + 1 FROM steps WHERE run_id = runs.id AND flags & 2 = 0
         ORDER BY step DESC LIMIT 1),
        (SELECT min(step) FROM steps WHERE run_id = runs.id)
    ) WHERE status = 'finished' AND last_flags & 2 <> 0
"""


def upgrade() -> None:
    op.create_table(
        'step_blocks',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('first', sa.BigInteger(), nullable=False),
        sa.Column('last', sa.BigInteger(), nullable=False),
        sa.Column('steps', sa.Integer(), nullable=False),
        sa.Column('is_sealed', sa.Boolean(), nullable=False),
        sa.Column('lows', sa.LargeBinary()),
        sa.Column('data', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_step_blocks_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'first', name='pk_step_blocks'),
    )
    in_tail = sa.text('NOT is_sealed')
    op.create_index(
        'ix_step_blocks_tail',
        'step_blocks',
        ['run_id', 'first'],
        sqlite_where=in_tail,
        postgresql_where=in_tail,
    )
    if op.get_context().dialect.name == 'postgresql':
        # They are compressed already. Rows of the tail live for some flushes only.
        op.execute('ALTER TABLE step_blocks ALTER COLUMN data SET STORAGE EXTERNAL')
        op.execute('ALTER TABLE step_blocks ALTER COLUMN lows SET STORAGE EXTERNAL')
        op.execute('ALTER TABLE step_blocks SET (autovacuum_vacuum_scale_factor = 0.02)')
    op.create_table(
        'loss_curves',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('stride', sa.BigInteger(), nullable=False),
        sa.Column('points', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_loss_curves_run_id'),
        sa.PrimaryKeyConstraint('run_id', name='pk_loss_curves'),
    )
    op.create_table(
        'step_conversions',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer()),
        sa.Column('steps', sa.BigInteger()),
        sa.Column('is_verified', sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_step_conversions_run_id'),
        sa.PrimaryKeyConstraint('run_id', name='pk_step_conversions'),
    )
    op.add_column('runs', sa.Column('last_elapsed_ms', sa.BigInteger()))
    op.add_column('runs', sa.Column('lost_since', sa.BigInteger()))
    op.execute(HAS_STEPS.format(active=ACTIVE))
    op.execute(IS_ACTIVE.format(active=ACTIVE))
    op.execute(LAST_ELAPSED)
    op.execute(LOST_SINCE)


def downgrade() -> None:
    # Charts of long runs need `halfstep rebuild` of the earlier version.
    _write_rows()
    op.drop_column('runs', 'lost_since')
    op.drop_column('runs', 'last_elapsed_ms')
    op.drop_table('step_conversions')
    op.drop_table('loss_curves')
    op.drop_table('step_blocks')


def _write_rows() -> None:
    """Write the steps of all blocks as rows."""
    connection = op.get_bind()
    steps = sa.table('steps', *map(sa.column, ('run_id', *block_codec.NAMES)))
    blocks = sa.table('step_blocks', *map(sa.column, ('run_id', 'first', 'data')))
    keys = connection.execute(sa.select(blocks.c.run_id, blocks.c.first)).all()
    for run_id, first in keys:
        its = (blocks.c.run_id == run_id, blocks.c.first == first)
        try:
            columns = block_codec.decode(
                bytes(connection.execute(sa.select(blocks.c.data).where(*its)).scalar_one())
            )
        except block_codec.Damaged:
            continue
        known = sa.select(steps.c.step).where(
            steps.c.run_id == run_id,
            steps.c.step.between(int(columns['step'][0]), int(columns['step'][-1])),
        )
        there = set(connection.execute(known).scalars())
        rows = block_codec.rows(columns)
        missing = [{'run_id': run_id, **row} for row in rows if row['step'] not in there]
        if missing:
            connection.execute(sa.insert(steps), missing)
