"""Blocks of metrics. The points of existing runs move into them after the upgrade, run by run."""

from contextlib import suppress
from itertools import groupby

import sqlalchemy as sa
from alembic import op

from db.telemetry import block_codec, metric_points
from db.telemetry.summaries import Points

revision = '0056'
down_revision = '0055'
branch_labels = None
depends_on = None

ACTIVE = "status IN ('starting', 'running', 'pausing', 'stopping', 'unreachable')"
HAS_METRICS = f"""
    FROM runs WHERE EXISTS (SELECT 1 FROM metrics WHERE run_id = runs.id) OR {ACTIVE}
"""
INSERT = f"""
    INSERT INTO step_conversions (run_id, is_verified, metrics_wait) SELECT id, true, true
    {HAS_METRICS} ON CONFLICT (run_id) DO NOTHING
"""
WAIT = f'UPDATE step_conversions SET metrics_wait = true WHERE run_id IN (SELECT id {HAS_METRICS})'
# Processes of the earlier version may still record rows of these, until their attempt ends.
IS_ACTIVE = f"""
    UPDATE step_conversions SET attempt = (
        SELECT attempt FROM runs WHERE id = run_id AND {ACTIVE} AND source <> 'watch'
    )
"""


def upgrade() -> None:
    op.create_table(
        'metric_blocks',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('first', sa.BigInteger(), nullable=False),
        sa.Column('last', sa.BigInteger(), nullable=False),
        sa.Column('points', sa.Integer(), nullable=False),
        sa.Column('low', sa.Double()),
        sa.Column('high', sa.Double()),
        sa.Column('size', sa.Integer(), nullable=False),
        sa.Column('lows', sa.LargeBinary(), nullable=False),
        sa.Column('data', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_metric_blocks_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'name', 'first', name='pk_metric_blocks'),
    )
    op.create_table(
        'metric_tails',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('revision', sa.BigInteger(), nullable=False),
        sa.Column('previous', sa.BigInteger(), nullable=False),
        sa.Column('points', sa.Integer(), nullable=False),
        sa.Column('data', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_metric_tails_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'revision', name='pk_metric_tails'),
    )
    if op.get_context().dialect.name == 'postgresql':
        # They are compressed already. Rows of the tail live for some flushes only.
        for table in ('metric_blocks', 'metric_tails'):
            op.execute(f'ALTER TABLE {table} ALTER COLUMN data SET STORAGE EXTERNAL')
            op.execute(f'ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02)')
        op.execute('ALTER TABLE metric_blocks ALTER COLUMN lows SET STORAGE EXTERNAL')
    op.add_column(
        'step_conversions',
        sa.Column('metrics_wait', sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.execute(INSERT)
    op.execute(WAIT)
    op.execute(IS_ACTIVE)


def downgrade() -> None:
    # Charts of long metrics need `halfstep rebuild` of the earlier version.
    _write_rows()
    op.drop_column('step_conversions', 'metrics_wait')
    op.drop_table('metric_tails')
    op.drop_table('metric_blocks')


def _write_rows() -> None:
    """Write the points of all blocks and tails as rows."""
    connection = op.get_bind()
    waiting = 'SELECT run_id FROM step_conversions WHERE metrics_wait'  # they have their rows
    is_converted = sa.text(f'run_id NOT IN ({waiting})')
    blocks = sa.table('metric_blocks', *map(sa.column, ('run_id', 'name', 'first', 'data')))
    tails = sa.table('metric_tails', *map(sa.column, ('run_id', 'revision', 'data')))
    keys = sa.select(blocks.c.run_id, blocks.c.name, blocks.c.first).where(is_converted)
    for run_id, name, first in connection.execute(keys).all():
        its = (blocks.c.run_id == run_id, blocks.c.name == name, blocks.c.first == first)
        data = connection.execute(sa.select(blocks.c.data).where(*its)).scalar_one()
        with suppress(block_codec.Damaged):
            _write(run_id, name, metric_points.decode(bytes(data)))
    of_tails = sa.select(tails.c.run_id, tails.c.data).where(is_converted)
    rows = connection.execute(of_tails.order_by(tails.c.run_id, tails.c.revision)).all()
    for run_id, parts in groupby(rows, lambda row: row[0]):
        intact = [bytes(data) for _, data in parts if block_codec.is_intact(bytes(data))]
        for name, points in metric_points.MetricPoints.join(intact).by_name():
            _write(run_id, name, points)


def _write(run_id: int, name: str, points: Points) -> None:
    metrics = sa.table(
        'metrics', *map(sa.column, ('run_id', 'name', 'step', 'value', 'elapsed_ms'))
    )
    span = metrics.c.step.between(int(points.step[0]), int(points.step[-1]))
    known = sa.select(metrics.c.step).where(metrics.c.run_id == run_id, metrics.c.name == name, span)
    there = set(op.get_bind().execute(known).scalars())
    columns = metric_points.columns_of(points)
    rows = zip(*(columns[each].tolist() for each in metric_points.NAMES), strict=True)
    made = [
        {
            'run_id': run_id,
            'name': name,
            'step': step,
            'value': None if value != value else value,
            'elapsed_ms': elapsed_ms,
        }
        for step, elapsed_ms, value in rows
        if step not in there
    ]
    if made:
        op.get_bind().execute(sa.insert(metrics), made)
