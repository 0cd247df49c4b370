"""Uploaded reports of `halfstep check`."""

import sqlalchemy as sa
from alembic import op

revision = '0049'
down_revision = '0048'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'check_reports',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('script', sa.Text(), nullable=False),
        sa.Column('torch', sa.Text(), nullable=False),
        sa.Column('steps', sa.Integer(), nullable=False),
        sa.Column('faults', sa.Integer(), nullable=False),
        sa.Column('notes', sa.Integer(), nullable=False),
        sa.Column('report', sa.JSON(), nullable=False),
        sa.Column('sources', sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_check_reports_project'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_check_reports_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_check_reports'),
    )
    op.create_index('ix_check_reports_project', 'check_reports', ['project'])


def downgrade() -> None:
    op.drop_table('check_reports')
