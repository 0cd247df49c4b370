"""Parts of a run and their revisions, indexes for looks, names of what workers offer."""

import sqlalchemy as sa
from alembic import op

revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None

LOOKED_AT = ('scaler_events', 'metrics', 'diagnoses')
FILES = ('checkpoints', 'artifacts')


def upgrade() -> None:
    for table in LOOKED_AT:
        op.create_index(op.f(f'ix_{table}_run_id_id'), table, ['run_id', 'id'])
    for table in FILES:
        op.add_column(table, sa.Column('revision', sa.BigInteger(), server_default='0', nullable=False))
    op.add_column('runs', sa.Column('files_revision', sa.BigInteger(), server_default='0', nullable=False))
    op.add_column('runs', sa.Column('idempotency_key', sa.Text(), nullable=True))
    op.create_index('ix_runs_idempotency_key', 'runs', ['owner_id', 'idempotency_key'], unique=True)
    op.create_index(op.f('ix_runs_parent_id'), 'runs', ['parent_id'])
    op.create_index(op.f('ix_runs_group_id'), 'runs', ['group_id'])
    op.add_column('workers', sa.Column('recipe_names', sa.JSON(), server_default='[]', nullable=False))
    if not op.get_context().as_sql:
        name_recipes(op.get_bind())


def name_recipes(connection: sa.Connection) -> None:
    workers = sa.table('workers', sa.column('id', sa.Integer), sa.column('recipes', sa.JSON), sa.column('recipe_names', sa.JSON))
    for worker_id, recipes in connection.execute(sa.select(workers.c.id, workers.c.recipes)).all():
        names = [recipe['name'] for recipe in recipes if 'schema' in recipe]
        connection.execute(sa.update(workers).where(workers.c.id == worker_id).values(recipe_names=names))


def downgrade() -> None:
    with op.batch_alter_table('workers') as batch_op:
        batch_op.drop_column('recipe_names')
    for index in ('group_id', 'parent_id'):
        op.drop_index(op.f(f'ix_runs_{index}'), 'runs')
    op.drop_index('ix_runs_idempotency_key', 'runs')
    with op.batch_alter_table('runs') as batch_op:
        batch_op.drop_column('idempotency_key')
        batch_op.drop_column('files_revision')
    for table in FILES:
        with op.batch_alter_table(table) as batch_op:
            batch_op.drop_column('revision')
    for table in LOOKED_AT:
        op.drop_index(op.f(f'ix_{table}_run_id_id'), table)
