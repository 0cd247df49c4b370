"""Tokens that send one run alone; of workers, which walls stand round their runs."""

import sqlalchemy as sa
from alembic import op

revision = '0032'
down_revision = '0031'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('api_tokens') as tokens:
        tokens.add_column(sa.Column('run_id', sa.Integer()))
        tokens.create_foreign_key('fk_api_tokens_run_id', 'runs', ['run_id'], ['id'])
    op.add_column('workers', sa.Column('walls', sa.JSON(), server_default='{}', nullable=False))


def downgrade() -> None:
    op.execute("DELETE FROM api_tokens WHERE kind = 'run'")
    op.drop_column('workers', 'walls')
    with op.batch_alter_table('api_tokens') as tokens:
        tokens.drop_constraint('fk_api_tokens_run_id', type_='foreignkey')
        tokens.drop_column('run_id')
