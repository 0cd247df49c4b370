"""Trials that a sweep gives up, notes, presets, rules of retention, and how hot devices are."""

import sqlalchemy as sa
from alembic import op

revision = '0031'
down_revision = '0030'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('trials', sa.Column('reports', sa.JSON(), nullable=False, server_default='[]'))
    op.add_column('trials', sa.Column('next_rung', sa.Integer(), nullable=False, server_default='1'))
    op.add_column('trials', sa.Column('pruned_step', sa.BigInteger()))
    op.add_column('system_samples', sa.Column('temperature_celsius', sa.Double()))
    op.create_table(
        'retention_rules',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text()),
        sa.Column('checkpoint_days', sa.Double()),
        sa.Column('log_days', sa.Double()),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('set_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_retention_rules_project'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_retention_rules_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_retention_rules'),
        sa.UniqueConstraint('project', name='uq_retention_rules_project'),
    )
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


def downgrade() -> None:
    for name in ('presets', 'notes', 'retention_rules'):
        op.drop_table(name)
    op.drop_column('system_samples', 'temperature_celsius')
    for name in ('pruned_step', 'next_rung', 'reports'):
        op.drop_column('trials', name)
