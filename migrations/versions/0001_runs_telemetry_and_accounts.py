"""Runs, telemetry and accounts."""

import sqlalchemy as sa
from alembic import op

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('users',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('password_hash', sa.Text(), nullable=True),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_users')),
    sa.UniqueConstraint('name', name=op.f('uq_users_name'))
    )
    op.create_table('workers',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('host', sa.Text(), nullable=False),
    sa.Column('pid', sa.Integer(), nullable=False),
    sa.Column('devices', sa.JSON(), nullable=False),
    sa.Column('recipes', sa.JSON(), nullable=False),
    sa.Column('versions', sa.JSON(), nullable=False),
    sa.Column('started_at', sa.Double(), nullable=False),
    sa.Column('seen_at', sa.Double(), nullable=False),
    sa.Column('stopped_at', sa.Double(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_workers')),
    sa.UniqueConstraint('name', name=op.f('uq_workers_name'))
    )
    op.create_table('api_tokens',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('token_hash', sa.Text(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.Column('used_at', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_api_tokens_user_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_api_tokens')),
    sa.UniqueConstraint('token_hash', name=op.f('uq_api_tokens_token_hash'))
    )
    op.create_table('runs',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('recipe', sa.Text(), nullable=False),
    sa.Column('config', sa.JSON(), nullable=False),
    sa.Column('precision', sa.Text(), nullable=False),
    sa.Column('tags', sa.Text(), nullable=False),
    sa.Column('owner_id', sa.Integer(), nullable=False),
    sa.Column('parent_id', sa.Integer(), nullable=True),
    sa.Column('parent_step', sa.BigInteger(), nullable=True),
    sa.Column('group_id', sa.Integer(), nullable=True),
    sa.Column('after_id', sa.Integer(), nullable=True),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('wanted', sa.Text(), nullable=False),
    sa.Column('priority', sa.Integer(), nullable=False),
    sa.Column('position', sa.Double(), nullable=False),
    sa.Column('nodes', sa.Integer(), nullable=False),
    sa.Column('devices_per_node', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('resumed_step', sa.BigInteger(), nullable=True),
    sa.Column('worker_id', sa.Integer(), nullable=True),
    sa.Column('stop_reason', sa.Text(), nullable=True),
    sa.Column('error', sa.Text(), nullable=True),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.Column('started_at', sa.Double(), nullable=True),
    sa.Column('ended_at', sa.Double(), nullable=True),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('steps_total', sa.BigInteger(), nullable=False),
    sa.Column('skipped', sa.BigInteger(), nullable=False),
    sa.Column('loss', sa.Double(), nullable=True),
    sa.Column('scale', sa.Double(), nullable=True),
    sa.Column('steps_per_second', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['after_id'], ['runs.id'], name=op.f('fk_runs_after_id')),
    sa.ForeignKeyConstraint(['group_id'], ['runs.id'], name=op.f('fk_runs_group_id')),
    sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_runs_owner_id')),
    sa.ForeignKeyConstraint(['parent_id'], ['runs.id'], name=op.f('fk_runs_parent_id')),
    sa.ForeignKeyConstraint(['worker_id'], ['workers.id'], name=op.f('fk_runs_worker_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_runs'))
    )
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.create_index('ix_runs_queue', ['status', 'priority', 'position'], unique=False)

    op.create_table('sessions',
    sa.Column('token_hash', sa.Text(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('csrf_token', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.Column('expires_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_sessions_user_id')),
    sa.PrimaryKeyConstraint('token_hash', name=op.f('pk_sessions'))
    )
    op.create_table('sign_in_links',
    sa.Column('token_hash', sa.Text(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('expires_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_sign_in_links_user_id')),
    sa.PrimaryKeyConstraint('token_hash', name=op.f('pk_sign_in_links'))
    )
    op.create_table('checkpoints',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('key', sa.Text(), nullable=False),
    sa.Column('size_bytes', sa.BigInteger(), nullable=False),
    sa.Column('sha256', sa.Text(), nullable=False),
    sa.Column('reason', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_checkpoints_run_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_checkpoints')),
    sa.UniqueConstraint('run_id', 'step', 'kind', name=op.f('uq_checkpoints_run_id_step_kind'))
    )
    op.create_table('log_lines',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('number', sa.BigInteger(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('time', sa.Double(), nullable=False),
    sa.Column('stream', sa.Text(), nullable=False),
    sa.Column('text', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_log_lines_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'number', name=op.f('pk_log_lines')),
    sqlite_with_rowid=False
    )
    op.create_table('metrics',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('value', sa.Double(), nullable=True),
    sa.Column('elapsed_ms', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_metrics_run_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_metrics')),
    sa.UniqueConstraint('run_id', 'name', 'step', name=op.f('uq_metrics_run_id_name_step'))
    )
    op.create_table('requests',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('created_at', sa.Double(), nullable=False),
    sa.Column('obeyed_at', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_requests_run_id')),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_requests_user_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_requests'))
    )
    with op.batch_alter_table('requests', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_requests_run_id'), ['run_id'], unique=False)

    op.create_table('run_nodes',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('node', sa.Integer(), nullable=False),
    sa.Column('worker_id', sa.Integer(), nullable=False),
    sa.Column('devices', sa.JSON(), nullable=False),
    sa.Column('lease_expires_at', sa.Double(), nullable=False),
    sa.Column('ended_at', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_run_nodes_run_id')),
    sa.ForeignKeyConstraint(['worker_id'], ['workers.id'], name=op.f('fk_run_nodes_worker_id')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'node', name=op.f('pk_run_nodes'))
    )
    op.create_table('run_statuses',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.Column('fault', sa.Text(), nullable=True),
    sa.Column('time', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_run_statuses_run_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_run_statuses'))
    )
    with op.batch_alter_table('run_statuses', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_run_statuses_run_id_id'), ['run_id', 'id'], unique=False)

    op.create_table('scaler_events',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('optimizer', sa.Text(), nullable=False),
    sa.Column('scale_before', sa.Double(), nullable=False),
    sa.Column('scale_after', sa.Double(), nullable=False),
    sa.Column('loss_nonfinite', sa.Boolean(), nullable=False),
    sa.Column('culprits', sa.JSON(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_scaler_events_run_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_scaler_events')),
    sa.UniqueConstraint('run_id', 'step', 'kind', 'optimizer', name=op.f('uq_scaler_events_run_id_step_kind_optimizer'))
    )
    op.create_table('steps',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('elapsed_ms', sa.BigInteger(), nullable=False),
    sa.Column('step_us', sa.BigInteger(), nullable=False),
    sa.Column('loss', sa.Double(), nullable=True),
    sa.Column('scale', sa.Double(), nullable=True),
    sa.Column('grad_norm', sa.Double(), nullable=True),
    sa.Column('grad_norm_clipped', sa.Double(), nullable=True),
    sa.Column('lr', sa.Double(), nullable=True),
    sa.Column('flags', sa.Integer(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_steps_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'step', name=op.f('pk_steps')),
    sqlite_with_rowid=False
    )
    op.create_table('system_samples',
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('device', sa.Integer(), nullable=False),
    sa.Column('elapsed_ms', sa.BigInteger(), nullable=False),
    sa.Column('utilization', sa.Double(), nullable=True),
    sa.Column('memory_bytes', sa.BigInteger(), nullable=True),
    sa.Column('power_watts', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_system_samples_run_id')),
    sa.PrimaryKeyConstraint('run_id', 'device', 'elapsed_ms', name=op.f('pk_system_samples')),
    sqlite_with_rowid=False
    )


def downgrade() -> None:
    op.drop_table('system_samples')
    op.drop_table('steps')
    op.drop_table('scaler_events')
    with op.batch_alter_table('run_statuses', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_run_statuses_run_id_id'))

    op.drop_table('run_statuses')
    op.drop_table('run_nodes')
    with op.batch_alter_table('requests', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_requests_run_id'))

    op.drop_table('requests')
    op.drop_table('metrics')
    op.drop_table('log_lines')
    op.drop_table('checkpoints')
    op.drop_table('sign_in_links')
    op.drop_table('sessions')
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.drop_index('ix_runs_queue')

    op.drop_table('runs')
    op.drop_table('api_tokens')
    op.drop_table('workers')
    op.drop_table('users')
