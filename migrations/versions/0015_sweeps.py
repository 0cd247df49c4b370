"""Sweeps, which search settings of a recipe, and the trials that they are made of."""

import sqlalchemy as sa
from alembic import op

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('sweeps',
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
    sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_sweeps_owner_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_sweeps'))
    )
    op.create_index('ix_sweeps_idempotency_key', 'sweeps', ['owner_id', 'idempotency_key'], unique=True)
    op.create_index('ix_sweeps_status', 'sweeps', ['status'])
    op.create_table('trials',
    sa.Column('sweep_id', sa.Integer(), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('run_id', sa.Integer(), nullable=False),
    sa.Column('params', sa.JSON(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('value', sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_trials_run_id')),
    sa.ForeignKeyConstraint(['sweep_id'], ['sweeps.id'], name=op.f('fk_trials_sweep_id')),
    sa.PrimaryKeyConstraint('sweep_id', 'number', name=op.f('pk_trials')),
    sqlite_with_rowid=False
    )
    op.create_index('ix_trials_run_id', 'trials', ['run_id'], unique=True)
    op.create_index('ix_trials_state', 'trials', ['state'])


def downgrade() -> None:
    op.drop_table('trials')
    op.drop_table('sweeps')
