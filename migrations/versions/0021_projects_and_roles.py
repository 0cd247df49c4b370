"""Give people roles in projects; whoever was there before may do everything, as before."""

import sqlalchemy as sa
from alembic import op

revision = '0021'
down_revision = '0020'
branch_labels = None
depends_on = None

#: What is written of deeds nobody changes or takes back.
KEPT = {
    'sqlite': [
        f"CREATE TRIGGER deeds_no_{verb} BEFORE {verb} ON deeds "
        "BEGIN SELECT RAISE(ABORT, 'deeds are kept'); END"
        for verb in ('update', 'delete')
    ],
    'postgresql': [
        "CREATE FUNCTION deeds_are_kept() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'deeds are kept'; END $$",
        'CREATE TRIGGER deeds_no_change BEFORE UPDATE OR DELETE ON deeds '
        'FOR EACH ROW EXECUTE FUNCTION deeds_are_kept()',
    ],
}


def upgrade() -> None:
    with op.batch_alter_table('users') as users:
        users.add_column(sa.Column('key', sa.Text()))
        users.add_column(sa.Column('is_operator', sa.Boolean(), nullable=False, server_default=sa.false()))
        users.add_column(sa.Column('runs_commands', sa.Boolean(), nullable=False, server_default=sa.false()))
        users.add_column(sa.Column('deactivated_at', sa.Double()))
        users.add_column(sa.Column('removed_at', sa.Double()))
    # Of two that look alike both may still sign in, by the names that they have.
    op.execute(
        "UPDATE users SET is_operator = true, key = lower(name) || CASE WHEN EXISTS ("
        "SELECT 1 FROM users AS other WHERE lower(other.name) = lower(users.name) AND other.id < users.id"
        ") THEN ' ' || users.id ELSE '' END"
    )
    with op.batch_alter_table('users') as users:
        users.alter_column('key', existing_type=sa.Text(), nullable=False)
        users.create_unique_constraint('uq_users_key', ['key'])
    op.create_table(
        'projects',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('viewers_download', sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('name', name='pk_projects'),
    )
    op.create_table(
        'memberships',
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('role', sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_memberships_project_projects'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_memberships_user_id_users'),
        sa.PrimaryKeyConstraint('project', 'user_id', name='pk_memberships'),
    )
    op.create_index('ix_memberships_user_id', 'memberships', ['user_id'])
    op.execute(
        "INSERT INTO projects (name, created_at) "
        "SELECT project, min(created_at) FROM runs WHERE project <> '' GROUP BY project"
    )
    op.execute("INSERT INTO projects (name, created_at) VALUES ('', 0)")
    with op.batch_alter_table('sweeps') as sweeps:
        sweeps.add_column(sa.Column('project', sa.Text(), nullable=False, server_default=''))
    with op.batch_alter_table('api_tokens') as tokens:
        tokens.add_column(sa.Column('project', sa.Text()))
        tokens.add_column(sa.Column('expires_at', sa.Double()))
    op.create_table(
        'deeds',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('time', sa.Double(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('token', sa.Text()),
        sa.Column('deed', sa.Text(), nullable=False),
        sa.Column('run_id', sa.Integer()),
        sa.Column('address', sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_deeds_user_id_users'),
        sa.PrimaryKeyConstraint('id', name='pk_deeds'),
    )
    op.create_index('ix_deeds_run_id', 'deeds', ['run_id'])
    op.create_index('ix_deeds_user_id', 'deeds', ['user_id'])
    for statement in KEPT[op.get_context().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    op.drop_table('deeds')
    if op.get_context().dialect.name == 'postgresql':
        op.execute('DROP FUNCTION deeds_are_kept')
    with op.batch_alter_table('api_tokens') as tokens:
        tokens.drop_column('expires_at')
        tokens.drop_column('project')
    with op.batch_alter_table('sweeps') as sweeps:
        sweeps.drop_column('project')
    op.drop_table('memberships')
    op.drop_table('projects')
    with op.batch_alter_table('users') as users:
        users.drop_constraint('uq_users_key', type_='unique')
        for name in ('removed_at', 'deactivated_at', 'runs_commands', 'is_operator', 'key'):
            users.drop_column(name)
