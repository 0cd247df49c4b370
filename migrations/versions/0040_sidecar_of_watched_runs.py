"""How far the spool of a watched run's sidecar is uploaded: its log lines and system samples."""

import sqlalchemy as sa
from alembic import op

revision = '0040'
down_revision = '0039'
branch_labels = None
depends_on = None

COLUMNS = ('sidecar_sequence', 'sidecar_offset')


def upgrade() -> None:
    for name in COLUMNS:
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default='0')
        op.add_column('watched_attempts', column)


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column('watched_attempts', name)
