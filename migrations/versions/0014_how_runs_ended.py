"""What a run failed by, beside its status."""

import sqlalchemy as sa
from alembic import op

revision = '0014'
down_revision = '0013'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('fault', sa.Text(), nullable=True))
    runs = sa.table('runs', sa.column('id'), sa.column('fault'))
    said = sa.table('run_statuses', sa.column('id'), sa.column('run_id'), sa.column('fault'))
    changes = sa.select(said.c.fault).where(said.c.run_id == runs.c.id).order_by(said.c.id.desc())
    fault = changes.limit(1).correlate(runs).scalar_subquery()
    op.execute(sa.update(runs).values(fault=fault))


def downgrade() -> None:
    op.drop_column('runs', 'fault')
