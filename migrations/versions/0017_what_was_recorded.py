"""How many steps of a run were recorded, which nothing takes back."""

import sqlalchemy as sa
from alembic import op

revision = '0017'
down_revision = '0016'
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ('recorded_steps', 'recorded_skips'):
        op.add_column('runs', sa.Column(name, sa.BigInteger(), nullable=False, server_default='0'))
    columns = ('step', 'parent_step', 'skipped', 'recorded_steps', 'recorded_skips')
    runs = sa.table('runs', *map(sa.column, columns))
    own = runs.c.step - sa.func.coalesce(runs.c.parent_step, 0)
    is_own = sa.case((own > 0, own), else_=0)
    op.execute(sa.update(runs).values(recorded_steps=is_own, recorded_skips=runs.c.skipped))


def downgrade() -> None:
    for name in ('recorded_steps', 'recorded_skips'):
        op.drop_column('runs', name)
