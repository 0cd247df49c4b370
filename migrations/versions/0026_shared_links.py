"""Links that show runs without a sign-in; deeds that say more, those of nobody known among them."""

import sqlalchemy as sa
from alembic import op

revision = '0026'
down_revision = '0025'
branch_labels = None
depends_on = None

#: SQLite makes the table anew, without what keeps its rows.
KEPT = [
    f"CREATE TRIGGER deeds_no_{verb} BEFORE {verb} ON deeds BEGIN SELECT RAISE(ABORT, 'deeds are kept'); END"
    for verb in ('update', 'delete')
]


def upgrade() -> None:
    op.create_table(
        'shared_links',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('token_hash', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('expires_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_shared_links_user_id_users'),
        sa.PrimaryKeyConstraint('id', name='pk_shared_links'),
        sa.UniqueConstraint('token_hash', name='uq_shared_links_token_hash'),
    )
    op.create_index('ix_shared_links_user_id', 'shared_links', ['user_id'])
    op.create_table(
        'shared_runs',
        sa.Column('link_id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('place', sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(['link_id'], ['shared_links.id'], name='fk_shared_runs_link_id_shared_links'),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_shared_runs_run_id_runs'),
        sa.PrimaryKeyConstraint('link_id', 'run_id', name='pk_shared_runs'),
    )
    op.create_index('ix_shared_runs_run_id', 'shared_runs', ['run_id'])
    with op.batch_alter_table('deeds') as deeds:
        deeds.add_column(sa.Column('detail', sa.Text(), server_default='', nullable=False))
        deeds.alter_column('user_id', existing_type=sa.Integer(), nullable=True)
        deeds.create_index('ix_deeds_time', ['time'])
    if op.get_context().dialect.name == 'sqlite':
        for statement in KEPT:
            op.execute(statement)


def downgrade() -> None:
    is_sqlite = op.get_context().dialect.name == 'sqlite'
    switch = ('DROP TRIGGER deeds_no_delete',) if is_sqlite else ('ALTER TABLE deeds DISABLE TRIGGER deeds_no_change',)
    for statement in (*switch, 'DELETE FROM deeds WHERE user_id IS NULL'):
        op.execute(statement)
    with op.batch_alter_table('deeds') as deeds:
        deeds.drop_index('ix_deeds_time')
        deeds.alter_column('user_id', existing_type=sa.Integer(), nullable=False)
        deeds.drop_column('detail')
    for statement in KEPT if is_sqlite else ('ALTER TABLE deeds ENABLE TRIGGER deeds_no_change',):
        op.execute(statement)
    op.drop_table('shared_runs')
    op.drop_table('shared_links')
