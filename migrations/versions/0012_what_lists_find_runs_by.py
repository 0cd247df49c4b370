"""Settings of runs and latest points of metrics, for lists to be filtered and sorted by; saved views."""

import json

import sqlalchemy as sa
from alembic import op

revision = '0012'
down_revision = '0011'
branch_labels = None
depends_on = None

MOST, PATH_CHARACTERS, TEXT_CHARACTERS = 1000, 200, 200
RUNS_AT_ONCE = 200
TEXTS = ['name', 'recipe', 'precision', 'tags', 'owner_id', 'project', 'status', 'source', 'created_at']


def upgrade() -> None:
    op.create_table('run_settings',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('path', sa.Text(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('number', sa.Double(), nullable=True),
    sa.Column('text', sa.Text(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_run_settings_run_id')),
    sa.PrimaryKeyConstraint('name', 'path', 'run_id', name=op.f('pk_run_settings')),
    sqlite_with_rowid=False
    )
    op.create_table('latest_metrics',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('value', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_latest_metrics_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'name', name=op.f('pk_latest_metrics')),
    sqlite_with_rowid=False
    )
    op.create_table('saved_views',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('filter', sa.Text(), nullable=False),
    sa.Column('sort', sa.Text(), nullable=False),
    sa.Column('columns', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_saved_views_user_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_saved_views')),
    sa.UniqueConstraint('user_id', 'name', name=op.f('uq_saved_views_user_id_name'))
    )
    op.execute(
        'INSERT INTO latest_metrics (run_id, name, step, value)'
        ' SELECT metrics.run_id, metrics.name, metrics.step, metrics.value FROM metrics'
        ' JOIN (SELECT run_id, name, max(step) AS step FROM metrics GROUP BY run_id, name) AS latest'
        ' ON metrics.run_id = latest.run_id AND metrics.name = latest.name AND metrics.step = latest.step'
    )
    if not op.get_context().as_sql:
        note_settings(op.get_bind())
    op.create_index(op.f('ix_run_settings_run_id'), 'run_settings', ['run_id'])
    if op.get_context().dialect.name == 'sqlite':
        op.create_index('ix_runs_texts', 'runs', TEXTS)
    op.create_index(op.f('ix_latest_metrics_name_value_run_id'), 'latest_metrics', ['name', 'value', 'run_id'])


def note_settings(connection: sa.Connection) -> None:
    runs = sa.table('runs', sa.column('id', sa.Integer), sa.column('config', sa.JSON))
    columns = ('run_id', 'path', 'name', 'number', 'text')
    settings = sa.table('run_settings', *(sa.column(name) for name in columns))
    last = 0
    while found := connection.execute(
        sa.select(runs.c.id, runs.c.config).where(runs.c.id > last).order_by(runs.c.id).limit(RUNS_AT_ONCE)
    ).all():
        last = found[-1].id
        rows = [row for run_id, config in found for row in rows_of(run_id, config)]
        if rows:
            connection.execute(sa.insert(settings), rows)


def rows_of(run_id, config):
    flat = dict(list(flattened(config))[:MOST])
    return [
        {'run_id': run_id, 'path': path, 'name': path.rpartition('.')[2], 'number': number, 'text': text}
        for path, value in flat.items()
        for number, text in [as_kept(value)]
    ]


def flattened(config, above=''):
    for name, value in config.items() if isinstance(config, dict) else ():
        path = f'{above}{name}'
        if isinstance(value, dict):
            yield from flattened(value, f'{path}.')
        elif len(path) <= PATH_CHARACTERS:
            yield path, value


def as_kept(value):
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value), None
        except OverflowError:
            return None, None
    return None, (value if isinstance(value, str) else json.dumps(value))[:TEXT_CHARACTERS]


def downgrade() -> None:
    if op.get_context().dialect.name == 'sqlite':
        op.drop_index('ix_runs_texts', 'runs')
    op.drop_table('saved_views')
    op.drop_table('latest_metrics')
    op.drop_table('run_settings')
