"""Tables, columns and keys get the field's names, with their rows."""

import sqlalchemy as sa
from alembic import op

from migrations import values

revision = '0039'
down_revision = '0038'
branch_labels = None
depends_on = None

TABLES = {
    'deeds': 'audit_events',
    'notices': 'alerts',
    'tries': 'login_attempts',
    'requests': 'control_requests',
    'checkpoints': 'checkpoint_files',
    'run_settings': 'run_config_values',
    'alert_looks': 'alert_evaluations',
}
#: By table, as it is called now.
COLUMNS = {
    'audit_events': {'deed': 'action'},
    'alerts': {'well_at': 'resolved_at'},
    'alert_evaluations': {'looked_at': 'evaluated_at'},
    'deliveries': {'notice_id': 'alert_id'},
    'users': {'is_operator': 'is_admin'},
    'runs': {
        'wanted': 'desired_state',
        'fault': 'failure_kind',
        'heard_at': 'last_report_at',
        'rewinds': 'rollbacks',
        'rewound_step': 'rollback_step',
    },
    'run_statuses': {'fault': 'failure_kind'},
    'control_requests': {'obeyed_at': 'acknowledged_at'},
    'workers': {'walls_stand': 'is_sandboxed', 'walls': 'sandbox'},
    'placements': {'tries': 'attempts'},
}
OPEN = sa.text('resolved_at IS NULL')
WAS_OPEN = sa.text('well_at IS NULL')
#: Indexes whose names hold one of those: before and after, by table, with their columns.
INDEXES = [
    ('ix_deeds_run_id', 'ix_audit_events_run_id', 'audit_events', ['run_id']),
    ('ix_deeds_time', 'ix_audit_events_time', 'audit_events', ['time']),
    ('ix_deeds_user_id', 'ix_audit_events_user_id', 'audit_events', ['user_id']),
    ('ix_notices_run_id', 'ix_alerts_run_id', 'alerts', ['run_id']),
    ('ix_notices_user_id', 'ix_alerts_user_id', 'alerts', ['user_id', 'id']),
    ('ix_notices_open', 'ix_alerts_open', 'alerts', ['rule_id', 'run_id']),
    ('ix_requests_run_id', 'ix_control_requests_run_id', 'control_requests', ['run_id']),
    ('ix_run_settings_run_id', 'ix_run_config_values_run_id', 'run_config_values', ['run_id']),
    ('ix_tries_tried_at', 'ix_login_attempts_tried_at', 'login_attempts', ['tried_at']),
    ('ix_deliveries_notice_id', 'ix_deliveries_alert_id', 'deliveries', ['alert_id']),
]
#: Settings of `spike`, and fields of diagnoses by kind.
SETTINGS = {'rewind': 'rollback', 'most_rewinds': 'max_rollbacks'}
FIELDS = {'spike': {'rewound_to': 'rolled_back_to'}, 'rewound': {'rewinds': 'rollbacks'}}


def rename_values(
    settings: dict[str, str],
    fields: dict[str, dict[str, str]],
    token_kinds: dict[str, str],
    diagnosis_kinds: dict[str, str],
) -> None:
    """Rename what rows hold: settings, fields of diagnoses, kinds of tokens and diagnoses."""
    values.rename_spike(settings, {})
    values.rename_in_diagnoses(fields)
    for old, new in token_kinds.items():
        op.execute(f"UPDATE api_tokens SET kind = '{new}' WHERE kind = '{old}'")
    for old, new in diagnosis_kinds.items():
        op.execute(f"UPDATE diagnoses SET kind = '{new}' WHERE kind = '{old}'")


def rename_on_postgresql(old: str, new: str) -> None:
    """Rename what bears a table's name there: its key and its sequence."""
    if op.get_context().dialect.name == 'postgresql':
        op.execute(f'ALTER INDEX pk_{old} RENAME TO pk_{new}')
        op.execute(f'ALTER SEQUENCE IF EXISTS {old}_id_seq RENAME TO {new}_id_seq')


def rename_unique(table: str, old: str, new: str) -> None:
    """Rename the key of a run's files, for which SQLite builds the table anew."""
    if op.get_context().dialect.name == 'postgresql':
        op.execute(f'ALTER TABLE {table} RENAME CONSTRAINT {old} TO {new}')
        return
    with op.batch_alter_table(table) as files:
        files.drop_constraint(old, type_='unique')
        files.create_unique_constraint(new, ['run_id', 'step', 'kind'])


def upgrade() -> None:
    tables = {new: old for old, new in TABLES.items()}
    for old, _new, table, _columns in INDEXES:
        op.drop_index(old, table_name=tables.get(table, table))
    for old, new in TABLES.items():
        op.rename_table(old, new)
        rename_on_postgresql(old, new)
    for table, names in COLUMNS.items():
        for old, new in names.items():
            op.execute(f'ALTER TABLE {table} RENAME COLUMN {old} TO {new}')
    rename_unique('checkpoint_files', 'uq_checkpoints_run_id_step_kind', 'uq_checkpoint_files_run_id_step_kind')
    for _old, new, table, columns in INDEXES:
        more = {'unique': True, 'sqlite_where': OPEN, 'postgresql_where': OPEN} if new == 'ix_alerts_open' else {}
        op.create_index(new, table, columns, **more)
    rename_values(SETTINGS, FIELDS, {'steer': 'control'}, {'rewound': 'rolled_back'})


def downgrade() -> None:
    fields = {
        'spike': values.inverse(FIELDS['spike']),
        'rolled_back': values.inverse(FIELDS['rewound']),
    }
    rename_values(values.inverse(SETTINGS), fields, {'control': 'steer'}, {'rolled_back': 'rewound'})
    for _old, new, table, _columns in INDEXES:
        op.drop_index(new, table_name=table)
    rename_unique('checkpoint_files', 'uq_checkpoint_files_run_id_step_kind', 'uq_checkpoints_run_id_step_kind')
    for table, names in COLUMNS.items():
        for old, new in names.items():
            op.execute(f'ALTER TABLE {table} RENAME COLUMN {new} TO {old}')
    for old, new in TABLES.items():
        op.rename_table(new, old)
        rename_on_postgresql(new, old)
    tables = {new: old for old, new in TABLES.items()}
    for old, _new, table, columns in INDEXES:
        before = {new: old for old, new in COLUMNS.get(table, {}).items()}
        more = {'unique': True, 'sqlite_where': WAS_OPEN, 'postgresql_where': WAS_OPEN} if old == 'ix_notices_open' else {}
        op.create_index(old, tables.get(table, table), [before.get(name, name) for name in columns], **more)
