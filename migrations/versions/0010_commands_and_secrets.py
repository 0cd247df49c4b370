"""Commands through the queue: what they are, who offers them, and secrets for their environment."""

import sqlalchemy as sa
from alembic import op

revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None

UNENDED = ('queued', 'starting', 'running', 'pausing', 'paused', 'stopping', 'unreachable')


def upgrade() -> None:
    op.add_column('runs', sa.Column('command', sa.JSON(), nullable=True))
    op.add_column('workers', sa.Column('offers_commands', sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table('secrets',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('ciphertext', sa.Text(), nullable=False),
    sa.Column('user_id', sa.Integer(), nullable=False),
    sa.Column('set_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_secrets_user_id')),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_secrets'))
    )


def downgrade() -> None:
    # An earlier version knows watched runs, which it leaves to themselves; it would wait for the
    # recipe of a command in the queue, and read a precision out of its parameters.
    names = ('source', 'status', 'created_at', 'ended_at')
    runs = sa.table('runs', *(sa.column(name) for name in names))
    commands = runs.c.source == 'command'
    ended = {'status': 'cancelled', 'ended_at': runs.c.created_at}
    op.execute(sa.update(runs).where(commands, runs.c.status.in_(UNENDED)).values(ended))
    op.execute(sa.update(runs).where(commands).values(source='watch'))
    op.drop_table('secrets')
    with op.batch_alter_table('workers') as batch_op:
        batch_op.drop_column('offers_commands')
    with op.batch_alter_table('runs') as batch_op:
        batch_op.drop_column('command')
