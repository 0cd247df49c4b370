"""Alerts of the service itself, which have a subject and no run."""

import sqlalchemy as sa
from alembic import op

revision = '0052'
down_revision = '0051'
branch_labels = None
depends_on = None

IS_OPEN = sa.text('resolved_at IS NULL AND run_id IS NULL')


def upgrade() -> None:
    with op.batch_alter_table('alerts') as alerts:
        alerts.alter_column('run_id', existing_type=sa.Integer(), nullable=True)
        alerts.add_column(sa.Column('subject', sa.Text(), nullable=False, server_default=''))
    op.create_index(
        'ix_alerts_open_subject',
        'alerts',
        ['rule_id', 'subject'],
        unique=True,
        sqlite_where=IS_OPEN,
        postgresql_where=IS_OPEN,
    )


def downgrade() -> None:
    of_service = 'SELECT id FROM alerts WHERE run_id IS NULL'
    op.execute(f'DELETE FROM deliveries WHERE alert_id IN ({of_service})')
    op.execute('DELETE FROM alerts WHERE run_id IS NULL')
    op.execute("UPDATE alerts SET rule_id = NULL WHERE rule_id IN "
               "(SELECT id FROM alert_rules WHERE scope = 'service')")
    op.execute("DELETE FROM alert_rules WHERE scope = 'service'")
    op.drop_index('ix_alerts_open_subject', 'alerts')
    with op.batch_alter_table('alerts') as alerts:
        alerts.drop_column('subject')
        alerts.alter_column('run_id', existing_type=sa.Integer(), nullable=False)
