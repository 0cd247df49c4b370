"""What each step waited for data, what a step is made of, and runs that go back."""

import sqlalchemy as sa
from alembic import op

revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None

#: Bytes of a summary of steps before it told of waits, by the largest size that is so long.
LENGTHS = ((64, 96), (32_768, 116), (262_144, 156))


def upgrade() -> None:
    op.add_column('steps', sa.Column('data_us', sa.BigInteger(), nullable=True))
    op.add_column('runs', sa.Column('workload', sa.JSON(), nullable=True))
    op.add_column('runs', sa.Column('rewinds', sa.Integer(), server_default='0', nullable=False))
    op.add_column('runs', sa.Column('rewound_step', sa.BigInteger(), nullable=True))


def downgrade() -> None:
    buckets = sa.table('step_buckets', sa.column('size', sa.BigInteger), sa.column('summary', sa.LargeBinary))
    above = 0
    for size, length in LENGTHS:
        known = sa.func.substr(buckets.c.summary, 1, length, type_=sa.LargeBinary)
        op.execute(sa.update(buckets).where(buckets.c.size > above, buckets.c.size <= size).values(summary=known))
        above = size
    for column in ('rewound_step', 'rewinds', 'workload'):
        op.drop_column('runs', column)
    op.drop_column('steps', 'data_us')
