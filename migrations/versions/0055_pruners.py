"""Pruners of sweeps beside their samplers; Hyperband was a kind of sweep, with random points."""

import json

import sqlalchemy as sa
from alembic import op

revision = '0055'
down_revision = '0054'
branch_labels = None
depends_on = None

HYPERBAND = {'kind': 'hyperband', 'first': 1, 'factor': 3, 'last': 27, 'patience': 3}


def upgrade() -> None:
    op.add_column('sweeps', sa.Column('pruner', sa.JSON(none_as_null=True), nullable=True))
    op.execute(
        f"UPDATE sweeps SET kind = 'random', pruner = '{json.dumps(HYPERBAND)}' "
        "WHERE kind = 'hyperband'".replace(':', '\\:')
    )


def downgrade() -> None:
    op.execute(
        "UPDATE sweeps SET kind = CASE WHEN recipe <> '' AND pruner IS NOT NULL THEN 'hyperband' "
        "WHEN kind IN ('cmaes', 'qmc') THEN 'random' ELSE kind END"
    )
    with op.batch_alter_table('sweeps') as sweeps:
        sweeps.drop_column('pruner')
