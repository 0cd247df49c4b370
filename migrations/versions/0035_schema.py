"""The schema of revision 0035, in which installations of earlier revisions end up."""

import sqlalchemy as sa
from alembic import op

revision = '0035'
down_revision = None
branch_labels = None
depends_on = None

#: Audit events cannot be changed or deleted.
TRIGGERS = {
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


#: In order of creation.
TABLES = [
    'alert_looks', 'projects', 'steps', 'tries', 'users', 'workers', 'channels', 'deeds', 'memberships',
    'notes', 'presets', 'retention_rules', 'runs', 'saved_views', 'secrets', 'sessions', 'shared_links',
    'sign_in_links', 'sweeps', 'alert_rules', 'api_tokens', 'artifacts', 'checkpoints', 'diagnoses',
    'latest_metrics', 'log_lines', 'metric_buckets', 'metrics', 'placements', 'requests', 'run_environments',
    'run_nodes', 'run_settings', 'run_statuses', 'scaler_events', 'shared_runs', 'step_buckets',
    'system_samples', 'trials', 'watched_attempts', 'notices', 'deliveries',
]


def upgrade() -> None:
    op.create_table(
        'alert_looks',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('turn', sa.BigInteger(), nullable=False),
        sa.Column('looked_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_alert_looks'),
    )
    op.create_table(
        'projects',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('viewers_download', sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('devices', sa.Integer(), nullable=True),
        sa.Column('queued', sa.Integer(), nullable=True),
        sa.Column('stored_gib', sa.Double(), nullable=True),
        sa.Column('share', sa.Double(), server_default='1.0', nullable=False),
        sa.PrimaryKeyConstraint('name', name='pk_projects'),
    )
    op.create_table(
        'steps',
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
        sa.Column('data_us', sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint('run_id', 'step', name='pk_steps'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_steps_nonfinite', 'steps', ['run_id', 'step', 'flags'], sqlite_where=sa.text('(flags & 2) <> 0'), postgresql_where=sa.text('(flags & 2) <> 0'))
    op.create_index('ix_steps_skipped', 'steps', ['run_id', 'step', 'flags'], sqlite_where=sa.text('(flags & 1) <> 0'), postgresql_where=sa.text('(flags & 1) <> 0'))
    op.create_table(
        'tries',
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('who', sa.Text(), nullable=False),
        sa.Column('count', sa.Integer(), nullable=False),
        sa.Column('tried_at', sa.Double(), nullable=False),
        sa.Column('open_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('kind', 'who', name='pk_tries'),
    )
    op.create_index('ix_tries_tried_at', 'tries', ['tried_at'])
    op.create_table(
        'users',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('password_hash', sa.Text(), nullable=True),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('key', sa.Text(), nullable=False),
        sa.Column('is_operator', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('runs_commands', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('deactivated_at', sa.Double(), nullable=True),
        sa.Column('removed_at', sa.Double(), nullable=True),
        sa.Column('subject', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('id', name='pk_users'),
        sa.UniqueConstraint('key', name='uq_users_key'),
        sa.UniqueConstraint('name', name='uq_users_name'),
        sa.UniqueConstraint('subject', name='uq_users_subject'),
    )
    op.create_table(
        'workers',
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
        sa.Column('recipe_names', sa.JSON(), server_default='[]', nullable=False),
        sa.Column('offers_commands', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('walls_stand', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('precisions', sa.JSON(), server_default='[]', nullable=False),
        sa.Column('device_memory_bytes', sa.Double(), server_default='0', nullable=False),
        sa.Column('only_run_id', sa.Integer(), nullable=True),
        sa.Column('placement', sa.Text(), nullable=True),
        sa.Column('drained_at', sa.Double(), nullable=True),
        sa.Column('drain_stops', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('walls', sa.JSON(), server_default='{}', nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_workers'),
        sa.UniqueConstraint('name', name='uq_workers_name'),
    )
    op.create_table(
        'channels',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('target', sa.Text(), nullable=False),
        sa.Column('ciphertext', sa.Text(), nullable=False),
        sa.Column('is_on', sa.Boolean(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_channels_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_channels'),
    )
    op.create_index('ix_channels_user_id', 'channels', ['user_id'])
    op.create_table(
        'deeds',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('time', sa.Double(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=True),
        sa.Column('token', sa.Text(), nullable=True),
        sa.Column('deed', sa.Text(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=True),
        sa.Column('address', sa.Text(), nullable=False),
        sa.Column('detail', sa.Text(), server_default='', nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_deeds_user_id_users'),
        sa.PrimaryKeyConstraint('id', name='pk_deeds'),
    )
    op.create_index('ix_deeds_run_id', 'deeds', ['run_id'])
    op.create_index('ix_deeds_time', 'deeds', ['time'])
    op.create_index('ix_deeds_user_id', 'deeds', ['user_id'])
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
    op.create_table(
        'notes',
        sa.Column('subject', sa.Text(), nullable=False),
        sa.Column('text', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('changed_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_notes_user_id'),
        sa.PrimaryKeyConstraint('subject', name='pk_notes'),
    )
    op.create_table(
        'presets',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('recipe', sa.Text(), nullable=False),
        sa.Column('config', sa.JSON(), nullable=False),
        sa.Column('place', sa.JSON(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('saved_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_presets_project'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_presets_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_presets'),
        sa.UniqueConstraint('project', 'name', name='uq_presets_project_name'),
    )
    op.create_table(
        'retention_rules',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text(), nullable=True),
        sa.Column('checkpoint_days', sa.Double(), nullable=True),
        sa.Column('log_days', sa.Double(), nullable=True),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('set_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_retention_rules_project'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_retention_rules_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_retention_rules'),
        sa.UniqueConstraint('project', name='uq_retention_rules_project'),
    )
    op.create_table(
        'runs',
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
        sa.Column('killed_attempts', sa.Integer(), server_default='0', nullable=False),
        sa.Column('stalled_attempts', sa.Integer(), server_default='0', nullable=False),
        sa.Column('files_revision', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('idempotency_key', sa.Text(), nullable=True),
        sa.Column('source', sa.Text(), server_default='recipe', nullable=False),
        sa.Column('project', sa.Text(), server_default='', nullable=False),
        sa.Column('watch_id', sa.Text(), nullable=True),
        sa.Column('heard_at', sa.Double(), nullable=True),
        sa.Column('command', sa.JSON(), nullable=True),
        sa.Column('workload', sa.JSON(), nullable=True),
        sa.Column('rewinds', sa.Integer(), server_default='0', nullable=False),
        sa.Column('rewound_step', sa.BigInteger(), nullable=True),
        sa.Column('note', sa.Text(), server_default='', nullable=False),
        sa.Column('stored_bytes', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('deleted_at', sa.Double(), nullable=True),
        sa.Column('erasing', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column('erased_at', sa.Double(), nullable=True),
        sa.Column('fault', sa.Text(), nullable=True),
        sa.Column('recorded_steps', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('recorded_skips', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('nodes', sa.Integer(), server_default='1', nullable=False),
        sa.Column('expected_seconds', sa.Double(), nullable=True),
        sa.Column('first_since', sa.Double(), nullable=True),
        sa.Column('reservation', sa.JSON(), nullable=True),
        sa.Column('script_config', sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(['after_id'], ['runs.id'], name='fk_runs_after_id'),
        sa.ForeignKeyConstraint(['group_id'], ['runs.id'], name='fk_runs_group_id'),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name='fk_runs_owner_id'),
        sa.ForeignKeyConstraint(['parent_id'], ['runs.id'], name='fk_runs_parent_id'),
        sa.ForeignKeyConstraint(['worker_id'], ['workers.id'], name='fk_runs_worker_id'),
        sa.PrimaryKeyConstraint('id', name='pk_runs'),
    )
    op.create_index('ix_runs_deleted_at', 'runs', ['deleted_at'], sqlite_where=sa.text('deleted_at IS NOT NULL AND erased_at IS NULL'), postgresql_where=sa.text('deleted_at IS NOT NULL AND erased_at IS NULL'))
    op.create_index('ix_runs_ended_at', 'runs', ['ended_at'])
    op.create_index('ix_runs_group_id', 'runs', ['group_id'])
    op.create_index('ix_runs_idempotency_key', 'runs', ['owner_id', 'idempotency_key'], unique=True)
    op.create_index('ix_runs_parent_id', 'runs', ['parent_id'])
    op.create_index('ix_runs_queue', 'runs', ['status', sa.text('priority DESC'), 'position', 'id'])
    op.create_index('ix_runs_watch_id', 'runs', ['owner_id', 'watch_id'], unique=True)
    op.create_table(
        'saved_views',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('filter', sa.Text(), nullable=False),
        sa.Column('sort', sa.Text(), nullable=False),
        sa.Column('columns', sa.Text(), nullable=False),
        sa.Column('group', sa.Text(), server_default='', nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_saved_views_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_saved_views'),
        sa.UniqueConstraint('user_id', 'name', name='uq_saved_views_user_id_name'),
    )
    op.create_table(
        'secrets',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('ciphertext', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('set_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_secrets_user_id'),
        sa.PrimaryKeyConstraint('name', name='pk_secrets'),
    )
    op.create_table(
        'sessions',
        sa.Column('token_hash', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('csrf_token', sa.Text(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('expires_at', sa.Double(), nullable=False),
        sa.Column('by_link', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_sessions_user_id'),
        sa.PrimaryKeyConstraint('token_hash', name='pk_sessions'),
    )
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
        'sign_in_links',
        sa.Column('token_hash', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('expires_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_sign_in_links_user_id'),
        sa.PrimaryKeyConstraint('token_hash', name='pk_sign_in_links'),
    )
    op.create_table(
        'sweeps',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('owner_id', sa.Integer(), nullable=False),
        sa.Column('recipe', sa.Text(), nullable=False),
        sa.Column('config', sa.JSON(), nullable=False),
        sa.Column('space', sa.JSON(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('metric', sa.Text(), nullable=False),
        sa.Column('goal', sa.Text(), nullable=False),
        sa.Column('seed', sa.BigInteger(), nullable=False),
        sa.Column('runs_total', sa.Integer(), nullable=False),
        sa.Column('at_once', sa.Integer(), nullable=False),
        sa.Column('submitted', sa.Integer(), nullable=False),
        sa.Column('tags', sa.Text(), nullable=False),
        sa.Column('priority', sa.Integer(), nullable=False),
        sa.Column('devices_per_node', sa.Integer(), nullable=False),
        sa.Column('status', sa.Text(), nullable=False),
        sa.Column('error', sa.Text(), nullable=True),
        sa.Column('revision', sa.BigInteger(), nullable=False),
        sa.Column('idempotency_key', sa.Text(), nullable=True),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('project', sa.Text(), server_default='', nullable=False),
        sa.Column('nodes', sa.Integer(), server_default='1', nullable=False),
        sa.Column('command', sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name='fk_sweeps_owner_id'),
        sa.PrimaryKeyConstraint('id', name='pk_sweeps'),
    )
    op.create_index('ix_sweeps_idempotency_key', 'sweeps', ['owner_id', 'idempotency_key'], unique=True)
    op.create_index('ix_sweeps_status', 'sweeps', ['status'])
    op.create_table(
        'alert_rules',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('condition', sa.Text(), nullable=False),
        sa.Column('value', sa.Double(), nullable=True),
        sa.Column('metric', sa.Text(), nullable=False),
        sa.Column('scope', sa.Text(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=True),
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('channel_ids', sa.JSON(), nullable=False),
        sa.Column('is_on', sa.Boolean(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_alert_rules_run_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_alert_rules_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_alert_rules'),
    )
    op.create_index('ix_alert_rules_run_id', 'alert_rules', ['run_id'])
    op.create_index('ix_alert_rules_user_id', 'alert_rules', ['user_id'])
    op.create_table(
        'api_tokens',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('token_hash', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('used_at', sa.Double(), nullable=True),
        sa.Column('kind', sa.Text(), server_default='full', nullable=False),
        sa.Column('project', sa.Text(), nullable=True),
        sa.Column('expires_at', sa.Double(), nullable=True),
        sa.Column('run_id', sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_api_tokens_run_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_api_tokens_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_api_tokens'),
        sa.UniqueConstraint('token_hash', name='uq_api_tokens_token_hash'),
    )
    op.create_table(
        'artifacts',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('key', sa.Text(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('sha256', sa.Text(), nullable=False),
        sa.Column('revision', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('path', sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_artifacts_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_artifacts'),
        sa.UniqueConstraint('run_id', 'step', 'name', name='uq_artifacts_run_id_step_name'),
    )
    op.create_table(
        'checkpoints',
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
        sa.Column('revision', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('path', sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_checkpoints_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_checkpoints'),
        sa.UniqueConstraint('run_id', 'step', 'kind', name='uq_checkpoints_run_id_step_kind'),
    )
    op.create_table(
        'diagnoses',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('content', sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_diagnoses_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_diagnoses'),
        sa.UniqueConstraint('run_id', 'kind', 'step', name='uq_diagnoses_run_id_kind_step'),
    )
    op.create_index('ix_diagnoses_run_id_id', 'diagnoses', ['run_id', 'id'])
    op.create_table(
        'latest_metrics',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('value', sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_latest_metrics_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'name', name='pk_latest_metrics'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_latest_metrics_name_value_run_id', 'latest_metrics', ['name', 'value', 'run_id'])
    op.create_table(
        'log_lines',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('number', sa.BigInteger(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('time', sa.Double(), nullable=False),
        sa.Column('stream', sa.Text(), nullable=False),
        sa.Column('text', sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_log_lines_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'number', name='pk_log_lines'),
        sqlite_with_rowid=False,
    )
    op.create_table(
        'metric_buckets',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('size', sa.BigInteger(), nullable=False),
        sa.Column('bucket', sa.BigInteger(), nullable=False),
        sa.Column('summary', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_metric_buckets_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'name', 'size', 'bucket', name='pk_metric_buckets'),
        sqlite_with_rowid=False,
    )
    op.create_table(
        'metrics',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('value', sa.Double(), nullable=True),
        sa.Column('elapsed_ms', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_metrics_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_metrics'),
        sa.UniqueConstraint('run_id', 'name', 'step', name='uq_metrics_run_id_name_step'),
    )
    op.create_index('ix_metrics_run_id_id', 'metrics', ['run_id', 'id'])
    op.create_table(
        'placements',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('nodes', sa.Integer(), nullable=False),
        sa.Column('devices', sa.Integer(), nullable=False),
        sa.Column('tries', sa.Integer(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('placed_at', sa.Double(), nullable=False),
        sa.Column('ended_at', sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_placements_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_placements'),
    )
    op.create_index('ix_placements_open', 'placements', ['run_id'], sqlite_where=sa.text('ended_at IS NULL'), postgresql_where=sa.text('ended_at IS NULL'))
    op.create_table(
        'requests',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('obeyed_at', sa.Double(), nullable=True),
        sa.Column('value', sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_requests_run_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_requests_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_requests'),
    )
    op.create_index('ix_requests_run_id', 'requests', ['run_id'])
    op.create_table(
        'run_environments',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('content', sa.JSON(), nullable=False),
        sa.Column('source', sa.LargeBinary(), nullable=True),
        sa.Column('diff', sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_run_environments_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_run_environments'),
    )
    op.create_table(
        'run_nodes',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('node', sa.Integer(), nullable=False),
        sa.Column('worker_id', sa.Integer(), nullable=True),
        sa.Column('devices', sa.JSON(), nullable=False),
        sa.Column('lease_expires_at', sa.Double(), nullable=True),
        sa.Column('ended_at', sa.Double(), nullable=True),
        sa.Column('step_before', sa.BigInteger(), server_default='0', nullable=False),
        sa.Column('resumed_step', sa.BigInteger(), nullable=True),
        sa.Column('host', sa.Text(), nullable=True),
        sa.Column('port', sa.Integer(), nullable=True),
        sa.Column('ending', sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_run_nodes_run_id'),
        sa.ForeignKeyConstraint(['worker_id'], ['workers.id'], name='fk_run_nodes_worker_id'),
        sa.PrimaryKeyConstraint('run_id', 'attempt', 'node', name='pk_run_nodes'),
    )
    op.create_index('ix_run_nodes_open', 'run_nodes', ['worker_id'], sqlite_where=sa.text('ended_at IS NULL'), postgresql_where=sa.text('ended_at IS NULL'))
    op.create_table(
        'run_settings',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('path', sa.Text(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('number', sa.Double(), nullable=True),
        sa.Column('text', sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_run_settings_run_id'),
        sa.PrimaryKeyConstraint('name', 'path', 'run_id', name='pk_run_settings'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_run_settings_run_id', 'run_settings', ['run_id'])
    op.create_table(
        'run_statuses',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('status', sa.Text(), nullable=False),
        sa.Column('reason', sa.Text(), nullable=True),
        sa.Column('fault', sa.Text(), nullable=True),
        sa.Column('time', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_run_statuses_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_run_statuses'),
    )
    op.create_index('ix_run_statuses_run_id_id', 'run_statuses', ['run_id', 'id'])
    op.create_table(
        'scaler_events',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('optimizer', sa.Text(), nullable=False),
        sa.Column('scale_before', sa.Double(), nullable=False),
        sa.Column('scale_after', sa.Double(), nullable=False),
        sa.Column('loss_nonfinite', sa.Boolean(), nullable=False),
        sa.Column('culprits', sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_scaler_events_run_id'),
        sa.PrimaryKeyConstraint('id', name='pk_scaler_events'),
        sa.UniqueConstraint('run_id', 'step', 'kind', 'optimizer', name='uq_scaler_events_run_id_step_kind_optimizer'),
    )
    op.create_index('ix_scaler_events_run_id_id', 'scaler_events', ['run_id', 'id'])
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
    op.create_table(
        'step_buckets',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('size', sa.BigInteger(), nullable=False),
        sa.Column('bucket', sa.BigInteger(), nullable=False),
        sa.Column('summary', sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_step_buckets_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'size', 'bucket', name='pk_step_buckets'),
        sqlite_with_rowid=False,
    )
    op.create_table(
        'system_samples',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('device', sa.Integer(), nullable=False),
        sa.Column('elapsed_ms', sa.BigInteger(), nullable=False),
        sa.Column('utilization', sa.Double(), nullable=True),
        sa.Column('memory_bytes', sa.BigInteger(), nullable=True),
        sa.Column('power_watts', sa.Double(), nullable=True),
        sa.Column('temperature_celsius', sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_system_samples_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'device', 'elapsed_ms', name='pk_system_samples'),
        sqlite_with_rowid=False,
    )
    op.create_table(
        'trials',
        sa.Column('sweep_id', sa.Integer(), nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('params', sa.JSON(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('value', sa.Double(), nullable=True),
        sa.Column('reports', sa.JSON(), server_default='[]', nullable=False),
        sa.Column('next_rung', sa.Integer(), server_default='1', nullable=False),
        sa.Column('pruned_step', sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_trials_run_id'),
        sa.ForeignKeyConstraint(['sweep_id'], ['sweeps.id'], name='fk_trials_sweep_id'),
        sa.PrimaryKeyConstraint('sweep_id', 'number', name='pk_trials'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_trials_run_id', 'trials', ['run_id'], unique=True)
    op.create_index('ix_trials_state', 'trials', ['state'])
    op.create_table(
        'watched_attempts',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('host', sa.Text(), nullable=False),
        sa.Column('versions', sa.JSON(), nullable=False),
        sa.Column('sequence', sa.BigInteger(), nullable=False),
        sa.Column('offset', sa.BigInteger(), nullable=False),
        sa.Column('resumed', sa.JSON(), nullable=True),
        sa.Column('early', sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_watched_attempts_run_id'),
        sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_watched_attempts'),
    )
    op.create_table(
        'notices',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('rule_id', sa.Integer(), nullable=True),
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('condition', sa.Text(), nullable=False),
        sa.Column('text', sa.Text(), nullable=False),
        sa.Column('content', sa.JSON(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('well_at', sa.Double(), nullable=True),
        sa.Column('read_at', sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(['rule_id'], ['alert_rules.id'], name='fk_notices_rule_id'),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_notices_run_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_notices_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_notices'),
    )
    op.create_index('ix_notices_open', 'notices', ['rule_id', 'run_id'], unique=True, sqlite_where=sa.text('well_at IS NULL'), postgresql_where=sa.text('well_at IS NULL'))
    op.create_index('ix_notices_run_id', 'notices', ['run_id'])
    op.create_index('ix_notices_user_id', 'notices', ['user_id', 'id'])
    op.create_table(
        'deliveries',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('channel_id', sa.Integer(), nullable=False),
        sa.Column('notice_id', sa.Integer(), nullable=True),
        sa.Column('run_id', sa.Integer(), nullable=True),
        sa.Column('body', sa.Text(), nullable=False),
        sa.Column('attempts', sa.Integer(), nullable=False),
        sa.Column('due_at', sa.Double(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('tried_at', sa.Double(), nullable=True),
        sa.Column('answer', sa.Text(), nullable=False),
        sa.Column('ended_at', sa.Double(), nullable=True),
        sa.Column('is_delivered', sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(['channel_id'], ['channels.id'], name='fk_deliveries_channel_id'),
        sa.ForeignKeyConstraint(['notice_id'], ['notices.id'], name='fk_deliveries_notice_id'),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_deliveries_run_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_deliveries_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_deliveries'),
    )
    op.create_index('ix_deliveries_channel_id', 'deliveries', ['channel_id'])
    op.create_index('ix_deliveries_due', 'deliveries', ['due_at'], sqlite_where=sa.text('ended_at IS NULL'), postgresql_where=sa.text('ended_at IS NULL'))
    op.create_index('ix_deliveries_notice_id', 'deliveries', ['notice_id'])
    op.create_index('ix_deliveries_run_id', 'deliveries', ['run_id'])
    op.create_index('ix_deliveries_user_id', 'deliveries', ['user_id', 'id'])
    if op.get_context().dialect.name == 'sqlite':
        op.create_index('ix_runs_listed', 'runs', ['name', 'recipe', 'precision', 'tags', 'owner_id', 'project', 'status', 'source', 'created_at', 'deleted_at', 'fault', 'step', 'parent_step', 'skipped', 'loss', 'scale', 'priority', 'steps_per_second', 'attempt', 'started_at', 'ended_at', 'stored_bytes'])
    else:
        op.execute(
            'ALTER TABLE run_settings DROP CONSTRAINT pk_run_settings, '
            'ADD CONSTRAINT pk_run_settings PRIMARY KEY (name, path, run_id) INCLUDE (number, text)'
        )
        op.create_index('ix_runs_kept', 'runs', ['created_at', 'id'], postgresql_where=sa.text('deleted_at IS NULL'))
    for statement in TRIGGERS[op.get_context().dialect.name]:
        op.execute(statement)
    op.execute("INSERT INTO projects (name, created_at) VALUES ('', 0)")


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    if op.get_context().dialect.name == 'postgresql':
        op.execute('DROP FUNCTION deeds_are_kept')
