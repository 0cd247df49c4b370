"""Who uploaded which weights, and which request an idempotency key came with."""

import sqlalchemy as sa
from alembic import op

revision = '0036'
down_revision = '0035'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'uploads',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('upload', sa.Text(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text()),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('uploaded_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_uploads_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_uploads'),
    )
    op.create_index('ix_uploads_upload', 'uploads', ['upload', 'user_id'])
    for table in ('runs', 'sweeps'):
        op.add_column(table, sa.Column('request_hash', sa.Text()))


def downgrade() -> None:
    for table in ('sweeps', 'runs'):
        op.drop_column(table, 'request_hash')
    op.drop_table('uploads')
