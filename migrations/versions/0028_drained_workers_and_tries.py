"""Workers that are to take nothing more, and wrong passwords that all servers count together."""

import sqlalchemy as sa
from alembic import op

revision = '0028'
down_revision = '0027'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('workers', sa.Column('drained_at', sa.Double()))
    op.add_column('workers', sa.Column('drain_stops', sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        'tries',
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('who', sa.Text(), nullable=False),
        sa.Column('count', sa.Integer(), nullable=False),
        sa.Column('tried_at', sa.Double(), nullable=False),
        sa.Column('open_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('kind', 'who', name=op.f('pk_tries')),
    )
    op.create_index('ix_tries_tried_at', 'tries', ['tried_at'])


def downgrade() -> None:
    op.drop_table('tries')
    op.drop_column('workers', 'drain_stops')
    op.drop_column('workers', 'drained_at')
