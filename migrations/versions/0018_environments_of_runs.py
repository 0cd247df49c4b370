"""What runs were started in: machine, versions, command, source and git."""

import sqlalchemy as sa
from alembic import op

revision = '0018'
down_revision = '0017'
branch_labels = None
depends_on = None


def upgrade() -> None:
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


def downgrade() -> None:
    op.drop_table('run_environments')
