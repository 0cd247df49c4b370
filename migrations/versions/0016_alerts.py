"""Rules of what people want to be told, notices, channels and deliveries."""

import sqlalchemy as sa
from alembic import op

revision = '0016'
down_revision = '0015'
branch_labels = None
depends_on = None

IS_OPEN = sa.text('well_at IS NULL')
IS_DUE = sa.text('ended_at IS NULL')


def _key(table: str, column: str) -> sa.ForeignKeyConstraint:
    of = {'user_id': 'users', 'run_id': 'runs', 'rule_id': 'alert_rules', 'channel_id': 'channels', 'notice_id': 'notices'}
    return sa.ForeignKeyConstraint([column], [f'{of[column]}.id'], name=f'fk_{table}_{column}')


def upgrade() -> None:
    op.create_index('ix_runs_ended_at', 'runs', ['ended_at'])
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
        *(_key('alert_rules', column) for column in ('user_id', 'run_id')),
        sa.PrimaryKeyConstraint('id', name='pk_alert_rules'),
    )
    op.create_index('ix_alert_rules_user_id', 'alert_rules', ['user_id'])
    op.create_index('ix_alert_rules_run_id', 'alert_rules', ['run_id'])
    op.create_table(
        'alert_looks',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('turn', sa.BigInteger(), nullable=False),
        sa.Column('looked_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_alert_looks'),
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
        _key('channels', 'user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_channels'),
    )
    op.create_index('ix_channels_user_id', 'channels', ['user_id'])
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
        *(_key('notices', column) for column in ('user_id', 'rule_id', 'run_id')),
        sa.PrimaryKeyConstraint('id', name='pk_notices'),
    )
    op.create_index('ix_notices_open', 'notices', ['rule_id', 'run_id'], unique=True, sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)
    op.create_index('ix_notices_user_id', 'notices', ['user_id', 'id'])
    op.create_index('ix_notices_run_id', 'notices', ['run_id'])
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
        *(_key('deliveries', column) for column in ('user_id', 'channel_id', 'notice_id', 'run_id')),
        sa.PrimaryKeyConstraint('id', name='pk_deliveries'),
    )
    op.create_index('ix_deliveries_due', 'deliveries', ['due_at'], sqlite_where=IS_DUE, postgresql_where=IS_DUE)
    op.create_index('ix_deliveries_user_id', 'deliveries', ['user_id', 'id'])
    for column in ('channel_id', 'notice_id', 'run_id'):
        op.create_index(f'ix_deliveries_{column}', 'deliveries', [column])


def downgrade() -> None:
    for table in ('deliveries', 'notices', 'channels', 'alert_looks', 'alert_rules'):
        op.drop_table(table)
    op.drop_index('ix_runs_ended_at', 'runs')
