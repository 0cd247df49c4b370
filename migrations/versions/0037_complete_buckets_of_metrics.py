"""Keep only buckets of metrics that have a point beyond them: the others are read from points.

The index of uploads gets the name that the code has for it.
"""

from alembic import op

revision = '0037'
down_revision = '0036'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        'DELETE FROM metric_buckets WHERE NOT EXISTS (SELECT 1 FROM latest_metrics'
        ' WHERE latest_metrics.run_id = metric_buckets.run_id'
        ' AND latest_metrics.name = metric_buckets.name'
        ' AND latest_metrics.step >= (metric_buckets.bucket + 1) * metric_buckets.size)'
    )
    op.drop_index('ix_uploads_upload', 'uploads')
    op.create_index('ix_uploads_upload_user_id', 'uploads', ['upload', 'user_id'])


def downgrade() -> None:
    # Earlier versions read the other buckets too: their `halfstep rebuild RUN` writes them.
    op.drop_index('ix_uploads_upload_user_id', 'uploads')
    op.create_index('ix_uploads_upload', 'uploads', ['upload', 'user_id'])
