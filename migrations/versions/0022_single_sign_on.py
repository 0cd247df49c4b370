"""What a provider of identities knows a user by."""

import sqlalchemy as sa
from alembic import op

revision = '0022'
down_revision = '0021'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('users') as users:
        users.add_column(sa.Column('subject', sa.Text()))
        users.create_unique_constraint('uq_users_subject', ['subject'])


def downgrade() -> None:
    with op.batch_alter_table('users') as users:
        users.drop_constraint('uq_users_subject', type_='unique')
        users.drop_column('subject')
